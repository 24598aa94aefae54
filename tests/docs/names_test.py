"""What the prose of README.md and docs/ names is there: keys, options, files.

Blocks of code are checked by `commands_test.py`.
"""

import re

import pytest

from docs import write_reference
from moh_jax.cli import main
from moh_jax.config import (
  DataConfig,
  LLMConfig,
  OptimConfig,
  RouterConfig,
  base,
)
from tests.cli import tiny_checkpoint
from tests.docs import blocks

KEYS = set(re.findall(r"`([a-z]+\.[a-z_.]+)`", write_reference.sections()))
SECTIONS = {key.rpartition(".")[0] for key in KEYS}
# Of Google Cloud, Slurm, Docker, XLA and a benchmark.
FOREIGN = {"--spot", "--worker", "--requeue", "--signal", "--me", "--shm-size"}
FOREIGN |= {"--xla", "--layers", "--check", "--config", "--import"}
ROUTERS = ("two_stage", "query_norm", "none")  # others may be registered


def _spans(page):
  text = (blocks.ROOT / page).read_text()
  prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


@pytest.fixture(scope="module")
def options():
  calls = [
    (name, *kind.split()) for name in main.COMMANDS for kind in main.kinds(name)
  ]
  calls += [("bench", kind) for kind in ("attention", "model", "input")]
  texts = "".join(tiny_checkpoint.call(*call, "--help")[1] for call in calls)
  return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", texts))


@pytest.mark.parametrize("page", blocks.pages())
def test_keys_options_and_files_exist(page, options):
  spans = _spans(page)
  section = "|".join(sorted({name.partition(".")[0] for name in SECTIONS}))
  pattern = rf"(?:--config\.)?((?:{section})(?:\.[a-z_]+)+)(?:=.*)?"
  found = [re.fullmatch(pattern, span) for span in spans]
  named = {match[1] for match in found if match}
  assert {x for x in named if not x.endswith(".py")} <= KEYS | SECTIONS
  named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(spans))
  assert set(named) <= options | FOREIGN
  pattern = r"(?:moh_jax|tests|configs|benchmarks|docs)/[\w*./-]*"
  paths = [span for span in spans if re.fullmatch(pattern, span)]
  assert [path for path in paths if not [*blocks.ROOT.glob(path)]] == []


@pytest.mark.parametrize(
  "page, header, section, field",
  [
    ("concepts", "form", LLMConfig, "attention_impl"),
    ("concepts", "kind", RouterConfig, "kind"),
    ("concepts", "`gate_form`", RouterConfig, "gate_form"),
    ("data", "`data.decode`", DataConfig, "decode"),
    ("launching", "`optim.name`", OptimConfig, "name"),
  ],
)
def test_tables_of_values_are_whole(page, header, section, field):
  text = (blocks.ROOT / f"docs/{page}.md").read_text()
  (table,) = re.findall(rf"^\| {header} \|.*\n((?:\|.*\n)+)", text, re.M)
  names = ROUTERS if field == "kind" else base.choices(section, field)
  assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(names)
