"""What the prose of README.md and docs/ names is there: keys, options, files.

Blocks of code are checked by `commands_test.py`.
"""

import contextlib
import io
import re

import pytest

from docs import write_reference
from moh_jax.cli import main
from moh_jax.config.registry import get_router
from tests.docs import blocks

KEYS = set(re.findall(r"`([a-z]+\.[a-z_.]+)`", write_reference.sections()))
SECTIONS = {key.rpartition(".")[0] for key in KEYS}
# Of Google Cloud, Slurm, Docker, XLA and a benchmark.
FOREIGN = {"--spot", "--worker", "--requeue", "--signal", "--me", "--shm-size"}
FOREIGN |= {"--xla", "--layers", "--check", "--config", "--import"}


def _spans(page):
  text = (blocks.ROOT / page).read_text()
  prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def _help(*argv):
  out = io.StringIO()
  with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
    main.main([*argv, "--help"])
  return out.getvalue()


@pytest.fixture(scope="module")
def options():
  calls = [
    (name, *kind.split()) for name in main.COMMANDS for kind in main.kinds(name)
  ]
  calls += [("bench", kind) for kind in ("attention", "model", "input")]
  texts = "".join(_help(*call) for call in calls)
  return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", texts))


@pytest.mark.parametrize("page", blocks.pages())
def test_keys_of_the_config_exist(page):
  section = "|".join(sorted({name.partition(".")[0] for name in SECTIONS}))
  pattern = rf"(?:--config\.)?((?:{section})(?:\.[a-z_]+)+)(?:=.*)?"
  found = [re.fullmatch(pattern, span) for span in _spans(page)]
  named = {match[1] for match in found if match}
  named = {name for name in named if not name.endswith(".py")}
  assert named <= KEYS | SECTIONS


@pytest.mark.parametrize("page", blocks.pages())
def test_options_exist(page, options):
  named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(_spans(page)))
  assert set(named) <= options | FOREIGN


@pytest.mark.parametrize("page", blocks.pages())
def test_files_exist(page):
  pattern = r"(?:moh_jax|tests|configs|benchmarks|docs)/[\w*./-]*"
  paths = [span for span in _spans(page) if re.fullmatch(pattern, span)]
  assert [path for path in paths if not [*blocks.ROOT.glob(path)]] == []


@pytest.mark.parametrize(
  "page, header, key",
  [
    ("concepts", "form", "model.attention_impl"),
    ("concepts", "kind", "model.router.kind"),
    ("concepts", "`gate_form`", "model.router.gate_form"),
    ("data", "`data.decode`", "data.decode"),
    ("launching", "`optim.name`", "optim.name"),
  ],
)
def test_tables_of_values_are_whole(page, header, key):
  text = (blocks.ROOT / f"docs/{page}.md").read_text()
  (table,) = re.findall(rf"^\| {header} \|.*\n((?:\|.*\n)+)", text, re.M)
  shown = re.findall(r"^\| `(\w+)`", table, re.M)
  (choices,) = {
    choices.replace("'", "")
    for choices in re.findall(
      rf"^\| `{key}` .* One of (.*)\. \|$", write_reference.sections(), re.M
    )
    if "kernel" in choices or key != "model.attention_impl"
  }
  # Other tests of this process may have registered routers of their own.
  names = set(choices.split(", "))
  if key == "model.router.kind":
    names = {
      name for name in names if isinstance(get_router(name).module, str | None)
    }
  assert sorted(shown) == sorted(names)
