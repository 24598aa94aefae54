"""Entry points: argument parsing, errors in one line, exit statuses.

Exit status: 0 success, 1 a failed check or NaN, 2 wrong use or bad input. JAX
takes seconds to import, so help and what can be refused without it come first.
"""

import argparse
import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from moh_jax._version import __version__
from moh_jax.cli import command, flags, run_log
from moh_jax.cli.flags import Parser
from moh_jax.config import Config, reference
from moh_jax.config.registry import FAMILIES
from moh_jax.runtime import compilation_cache, processes, steps

# By what one does. Each is a module of this folder, see `command`.
GROUPS = {
  "use a model": ("classify", "sample", "generate"),
  "train": ("prepare", "plan", "train", "compare"),
  "measure": ("inspect", "evaluate", "heads", "fid", "bench"),
  "convert": ("convert", "export"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# The last is NaN.
_USER_ERRORS = ValueError, NotImplementedError, MemoryError, FloatingPointError
_FULL = "RESOURCE_EXHAUSTED"  # how XLA says that memory is full
_NO_DEVICE = ("Unable to initialize backend", "Unknown backend")
_LESS = (
  "; a smaller batch needs less (of a run: data.batch_size, or "
  "optim.accumulation for parts of it, and model.remat)"
)
_HELP = {"-h", "--help"}
Run = Callable[[Any], int]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m moh_jax COMMAND ...` and returns its exit status."""
  # Names that the terminal cannot show must not end a command.
  with contextlib.suppress(AttributeError):  # stdout may be a notebook's
    sys.stdout.reconfigure(errors="backslashreplace")
  argv = sys.argv[1:] if argv is None else argv
  parser = Parser(
    prog="python -m moh_jax",
    description="Mixture-of-Head attention: train, convert and use models.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--import",
    dest="modules",
    action="append",
    default=[],
    metavar="MODULE",
    help="import a module first, such as one that registers a family: a "
    "file, or a name in the current folder or installed",
  )
  version = f"moh_jax {__version__}"
  parser.add_argument("--version", action="version", version=version)
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
  if _HELP.intersection(argv[:1]):
    parser.epilog = "\n\n".join(
      _listed(title, {name: _sentence(name) for name in names})
      for title, names in GROUPS.items()
    )
  args = parser.parse_args(argv)
  return report_errors(
    lambda: _run(args.command, args.arguments, args.modules),
    "--traceback" in args.arguments,
  )


def run_process(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs a command as the whole of this process and ends it.

  What libraries warn their callers of, such as a deprecation, is nothing that
  a user of a command could change; `python -W default` shows it. After an error
  the process ends at once: threads of libraries may wait for ever for what has
  failed, and the processes of a run for one another.
  """
  if not sys.warnoptions:
    warnings.simplefilter("ignore")
  status = main(argv)
  if status:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  sys.exit(0)


def _run(name: str, argv: Sequence[str], modules: Sequence[str]) -> int:
  """Parses a command's arguments, checks its inputs and runs it."""
  for module in modules:
    folder, file = os.path.split(module) if module.endswith(".py") else ("", "")
    sys.path.insert(0, os.path.abspath(folder))
    try:
      importlib.import_module(file.removesuffix(".py") or module)
    except Exception as error:  # whatever the module's own code raises
      raise ValueError(
        f"--import {module!r}: {type(error).__name__}: {error}; it takes a "
        "file, or a name as `import` does, in the current folder or installed"
      ) from error
  given, run = parsed(name, argv)
  with run_log.shown():
    given.prepare()
    # Several processes would wait for one another's lock on a shared disk.
    if given.KEEPS_PROGRAMS and not getattr(given, "distributed", False):
      compilation_cache.enable()
    return run(given)


def parsed(name: str, argv: Sequence[str]) -> tuple[command.BaseOptions, Run]:
  """The options of a command, and the function that takes them.

  Wrong ones end the program with status 2, and --help with 0.

  Args:
    name: of the command.
    argv: what follows it.
  """
  prog, every, kind = f"python -m moh_jax {name}", kinds(name), ""
  if "" not in every:
    described = {k: reference.first_sentence(v[0]) for k, v in every.items()}
    parser = Parser(
      prog=prog,
      description=_sentence(name),
      formatter_class=argparse.RawDescriptionHelpFormatter,
      epilog=_listed("kinds", described),
    )
    parser.add_argument("kind", choices=every, metavar="KIND")
    kind, argv = parser.parse_args(argv[:1]).kind, argv[1:]
  cls, run = every[kind]
  parser = flags.make_parser(f"{prog} {kind}".rstrip(), cls, command.SHARED)
  if _HELP.intersection(argv):
    _help(parser, argv)
    sys.exit(0)
  return flags.parse(parser, cls, argv), run


def _help(parser: Parser, argv: Sequence[str]) -> None:
  """Shows a command's options, or the keys of a section of --config."""
  others, changes = flags.split_changes(argv)
  asked = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
  asked.add_argument("--config")
  asked.add_argument("-h", "--help", dest="section", nargs="?")
  given, _ = asked.parse_known_args(others)
  if not (given.section and given.config):
    parser.print_help()
  if given.config:
    config = _described(given.config, changes)
    if given.section:
      print(reference.describe(config, given.section))
    else:
      every = reference.sections(config)
      print(f"\n{_listed('sections of the config', every)}")


def _described(spec: str, changes: Sequence[str]) -> Config:
  """A config to describe; where a checkpoint has its model, any that fits."""
  try:
    return steps.load_config(spec, changes)
  except ValueError:
    for family in FAMILIES.records():
      with contextlib.suppress(ValueError):
        return steps.load_config(
          spec, [f"model.family={family.name}", *changes]
        )
    raise


def kinds(name: str) -> dict[str, tuple[type[command.BaseOptions], Run]]:
  """Options and function of each kind of a command; "" where it has one."""
  module = importlib.import_module(f"moh_jax.cli.{name}")
  if hasattr(module, "KINDS"):
    return module.KINDS
  return {"": (module.Options, module.run)}


def _listed(title: str, sentences: Mapping[str, str]) -> str:
  """A list of names with what they do, for a help."""
  lines = (f"  {name:<17} {text}" for name, text in sentences.items())
  return "\n".join([f"{title}:", *lines])


def _sentence(name: str) -> str:
  """What a command does: the first line of its options or its module."""
  module = importlib.import_module(f"moh_jax.cli.{name}")
  return reference.first_sentence(getattr(module, "Options", module))


def report_errors(call: Callable[[], int], show_traceback: bool) -> int:
  """Runs a command, turning the user's mistakes into lines on stderr."""
  try:
    with processes.handled():
      return call()
  except processes.StoppedError as stopped:
    print(f"error: {stopped}", file=sys.stderr)
    return stopped.status
  except Exception as error:
    text = _explained(error)
    if text is None:
      raise
    if show_traceback:
      traceback.print_exc()
    else:
      said = " ".join(text.split()) or type(error).__name__
      print(f"error: {said}", file=sys.stderr)
    return 1 if isinstance(error, FloatingPointError) else 2


def _explained(error: Exception) -> str | None:
  """What the user can mend of an error; None for a defect of ours."""
  text = str(error)
  if isinstance(error, ModuleNotFoundError):
    # jax, flax and few others are always installed.
    is_ours = (error.name or "moh_jax").partition(".")[0] == "moh_jax"
    return None if is_ours else f"{text}; pip install '.[train]' in the clone"
  if isinstance(error, OSError):
    return text
  if _FULL in text:  # disks may be full too
    return text if "No space left" in text else text + _LESS
  if isinstance(error, AssertionError):
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename.endswith("xla_bridge.py"):  # JAX asserts a backend
      platforms = os.environ.get("JAX_PLATFORMS")
      return f"JAX_PLATFORMS={platforms!r}: JAX finds no such device"
  is_library = type(error) is ImportError and error.name is None  # gcsfs lacks
  if isinstance(error, _USER_ERRORS) or is_library:
    return text
  return text if any(x in text for x in _NO_DEVICE) else None
