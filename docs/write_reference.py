"""Writes the pages of docs/reference/ from the package itself.

  python docs/write_reference.py && zensical build --strict

config.md has the sections and fields of a config, from the dataclasses'
docstrings; commands.md what every command prints for `--help`; api.md the
public names, whose docstrings mkdocstrings puts in. None of them is in git.
"""

import contextlib
import inspect
import io
import os
import pathlib
from typing import Any

import moh_jax
from moh_jax.cli import main
from moh_jax.config import reference
from moh_jax.config.registry import FAMILIES
from moh_jax.config.run import section_types

FOLDER = pathlib.Path(__file__).parent / "reference"

# Title -> public names, in the order of the page.
GROUPS = {
  "Layers": (
    "MoHAttention",
    "nnx",
    "HeadRouter",
    "HeadMix",
    "HeadBudget",
    "RouterConfig",
    "Router",
    "Routing",
    "register_router",
    "attention",
    "collect_aux",
  ),
  "Models": ("ViT", "DiT", "LLM", "get_model", "list_models"),
  "Families": (
    "Family",
    "ImageClassifierFamily",
    "register_family",
    "get_family",
  ),
  "Data": ("ImageSource", "register_source", "MissingSplitError"),
  "Runs and checkpoints": (
    "load_config",
    "train",
    "restore",
    "Restored",
    "Sampler",
    "Generator",
    "Sampling",
  ),
}


def config() -> str:
  """The page of config sections and fields."""
  return (
    "# Config\n\nAll sections of a config and their keys, with the defaults. "
    "On the command line a key is `--config.SECTION.FIELD=VALUE`.\n\n"
    f"{sections()}"
  )


def sections() -> str:
  """The sections of all families with their defaults."""
  families = {name: section_types(name) for name in FAMILIES.names()}
  first, *others = families.values()
  shared = {
    name: cls
    for name, cls in first.items()
    if all(other.get(name) is cls for other in others)
  }
  parts = ["## Sections of every family"]
  parts += [_table(name, cls()) for name, cls in shared.items()]
  described = set(shared.values())
  for family, types in families.items():
    parts.append(f"## Sections of `{family}`")
    for name, cls in types.items():
      if cls not in described:
        parts.append(_table(name, cls()))
      elif name not in shared:  # such as the images of two families
        parts.append(f"### {name}\n\n`{cls.__name__}`, see above.")
      described.add(cls)
  return "\n\n".join(parts) + "\n"


def _table(name: str, section: Any) -> str:
  lines = [
    f"### {name}",
    "",
    f"`{type(section).__name__}`: {reference.first_sentence(type(section))}",
    "",
    "| key | default | type | meaning |",
    "|---|---|---|---|",
  ]
  for key in reference.keys(name, section):
    cells = (f"`{key.name}`", f"`{key.value!r}`", f"`{key.type}`", key.meaning)
    lines.append(
      f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |"
    )
  return "\n".join(lines)


def commands() -> str:
  """The page of commands: the text of every `--help`."""
  parts = [
    "# Commands",
    "What `python -m moh_jax COMMAND --help` prints. Options that commands "
    "share have one name: `--checkpoint` is a run's folder, `--data` files or "
    "folders to read, `--out` where to write, `--json` a file for the metrics.",
  ]
  for name in main.COMMANDS:
    for kind in main.kinds(name):
      command = f"{name} {kind}".strip()
      parts += [f"## {command}", f"```text\n{_help(command)}\n```"]
  return "\n\n".join(parts) + "\n"


def _help(command: str) -> str:
  out = io.StringIO()
  os.environ["COLUMNS"] = "80"  # argparse's width
  with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main.main([*command.split(), "--help"])
  return out.getvalue().rstrip()


def api() -> str:
  """The page of public names, as blocks that mkdocstrings reads.

  Raises:
    ValueError: `GROUPS` and `moh_jax.__all__` do not hold the same names.
  """
  named = {name for names in GROUPS.values() for name in names}
  public = {name for name in moh_jax.__all__ if not name.startswith("__")}
  if named != public:
    raise ValueError(
      f"docs/write_reference.py: GROUPS lacks {sorted(public - named)} and has "
      f"{sorted(named - public)}, which moh_jax.__all__ does not"
    )
  parts = [
    "# Python API",
    "These names are public: `from moh_jax import NAME`. Everything else is "
    "private and may change, apart from the sections in `moh_jax.config`, "
    "which config files use. `import moh_jax` does not import JAX; a name is "
    "imported when it is first used.",
  ]
  for title, names in GROUPS.items():
    parts += [f"## {title}", *(_block(name) for name in names)]
  return "\n\n".join(parts) + "\n"


def _block(name: str) -> str:
  value = getattr(moh_jax, name)
  where = value.__name__
  if not inspect.ismodule(value):
    where = f"{value.__module__}.{value.__qualname__}"
  return (
    f"::: {where}\n    options:\n      heading: {name}\n      toc_label: {name}"
  )


if __name__ == "__main__":
  FOLDER.mkdir(exist_ok=True)
  (FOLDER / "config.md").write_text(config())
  (FOLDER / "commands.md").write_text(commands())
  (FOLDER / "api.md").write_text(api())
