"""What README.md and docs/ say is so: names, tables, measured figures.

Examples are tested by `commands_test.py`.
"""

import copy
import json
import re
import tomllib
from unittest import mock

import pytest

from benchmarks import tables
from docs import write_reference
from moh_jax.config import LLMConfig, OptimConfig, RouterConfig, base
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.devices import random_settings
from moh_jax.training import entrance
from tests.cli import tiny_checkpoint
from tests.cli.main_test import COMMANDS
from tests.docs import blocks
from tests.training import tiny

_PROJECT = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())


_CODE = r"^```python\n(.*?)^```$"
_COPIED = re.compile(
  rf"^<!-- test: none: the code of (\S+), which is tested -->\n{_CODE}",
  re.DOTALL | re.MULTILINE,
)


def _rows(page, heading):
  """Cells of the first table below a heading."""
  text = (blocks.ROOT / "docs" / page).read_text()
  table = text.partition(f"\n{heading}\n")[2].partition("\n|")[2]
  lines = table.partition("\n\n")[0].splitlines()[2:]
  assert lines, heading
  return [line.strip("| ").split(" | ") for line in lines]


def test_extras_and_markers_are_those_of_the_project():
  extras = {row[0].strip("`") for row in _rows("help.md", "## Extras")}
  assert extras == _PROJECT["project"]["optional-dependencies"].keys()
  markers = _PROJECT["tool"]["pytest"]["ini_options"]["markers"]
  rows = _rows("contributing.md", "## The whole suite")
  told = {row[0].strip("`") for row in rows}
  assert told == {"(none)", *(line.partition(":")[0] for line in markers)}


def test_frequent_errors_are_worded_so():
  files = sorted(blocks.ROOT.glob("moh_jax/**/*.py"))
  source = "".join(file.read_text() for file in files)
  source = re.sub(r'"\s+f?"', "", source)  # a text on several lines
  source = re.sub(r"\{[^{}]*\}", "...", source)
  for error, *_ in _rows("help.md", "## Frequent errors"):
    for part in re.split(r"\.\.\.|[,:;] ", re.match(r"`([^`]*)`", error)[1]):
      assert part.strip(" ,:;") in source, error


# Values that the sections' own checks take; other keys get any.
_VALUES = {
  "model.drop_path": 0.5,
  "model.dtype": "bfloat16",
  "model.attention_impl": "packed",
  "model.remat": "full",
  "classifier": ("mixup", 0.1),
  "sample": ("num", 7),
  "eval": ("examples", 3),
  "mesh": ("fsdp", 2),
  "checkpoint": ("every", 3),
  "log": ("every", 3),
  "tune": ("top_k_values", (1,)),
  "model": ("top_k", (0, 0)),
  "train.steps": 3,
}
_ZEROS = {
  f"optim.{name}" for name in ("b1", "clip_norm", "ema_decay", "skip_nonfinite")
}


_RUNS = (tiny.config(), tiny.dit_config(), tiny.llm_config())


def _refused(key, value):
  """Whether the runs that have a key refuse another value of it."""
  section, _, field = key.partition(".")
  if not field:
    field, value = value
  for config in _RUNS:
    changed = copy.deepcopy(config)
    values = changed.by_name().get(section)
    if hasattr(values, field):
      object.__setattr__(values, field, value)
      stored = Metadata(config), 0
      data = {"random": random_settings(), "stream": {}}
      with (
        mock.patch.object(entrance, "read_metadata", return_value=stored),
        mock.patch.object(entrance.steps, "read_json_item", return_value=data),
        mock.patch.object(entrance.steps, "step_folder"),
      ):
        try:
          entrance.check_same_run("run", 0, Metadata(changed), {})
          yield False
        except ValueError:
          yield True


def test_a_resumed_run_may_change_what_the_page_says():
  may = " ".join(row[0] for row in _rows("resume.md", "## What may change"))
  must = _rows("resume.md", "## What is refused")
  must = " ".join(row[0] for row in must if "other data" not in row[0])
  may, must = (set(re.findall(r"`([a-z0-9_.]+)`", x)) for x in (may, must))
  assert must >= _ZEROS
  for keys, other, refused in (
    (may - {"b1", "clip_norm", "ema_decay", "skip_nonfinite"}, 1, False),
    (must - {"train.steps"}, "other", True),
  ):
    for key in sorted(keys - _ZEROS):
      found = set(_refused(key, _VALUES.get(key, other)))
      assert found == {refused}, key
  # 0 is what some of the runs have, and it stays; of the last one all have it.
  for key in sorted(_ZEROS - {"optim.skip_nonfinite"}):
    assert not all(_refused(key, 1)), key
    assert any(_refused(key, 0)), key
  text = (blocks.ROOT / "docs/resume.md").read_text()
  for config in _RUNS:
    for section in ("optim", "train", "data"):
      for field in vars(getattr(config, section)):
        assert f"`{section}.{field}`" in text, (section, field)
    for field in config.model.RUNTIME_FIELDS:
      assert f"`model.{field}`" in text, field


KEYS = set(re.findall(r"`([a-z]+\.[a-z_.]+)`", write_reference.sections()))
SECTIONS = {key.rpartition(".")[0] for key in KEYS}
# Of Google Cloud, Slurm, Docker, XLA and a benchmark.
FOREIGN = {"--spot", "--worker", "--requeue", "--signal", "--me", "--shm-size"}
FOREIGN |= {"--xla", "--layers", "--check", "--config", "--import"}
FOREIGN |= {"--model", "--max-loras", "--trust-remote-code"}  # of vLLM


def _spans(page):
  text = (blocks.ROOT / page).read_text()
  prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


@pytest.fixture(scope="module")
def options():
  texts = "".join(tiny_checkpoint.call(*call, "--help")[1] for call in COMMANDS)
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


_ROUTERS = "two_stage", "query_norm", "timestep", "gate", "none"


def test_tables_of_values_are_whole():
  for page, header, names in (
    ("concepts", "form", base.choices(LLMConfig, "attention_impl")),
    ("concepts", "kind", _ROUTERS),
    ("concepts", "`gate_form`", base.choices(RouterConfig, "gate_form")),
    ("launching", "`optim.name`", base.choices(OptimConfig, "name")),
  ):
    text = (blocks.ROOT / f"docs/{page}.md").read_text()
    (table,) = re.findall(rf"^\| {header} \|.*\n((?:\|.*\n)+)", text, re.M)
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(names)


def test_code_of_a_file_is_that_of_the_file():
  copied = []
  for page in blocks.pages():
    text = (blocks.ROOT / page).read_text()
    assert "--8<--" not in text, page  # only the site would show what it names
    for file, code in _COPIED.findall(text):
      source = (blocks.ROOT / file).read_text()
      assert code in source if file.endswith(".md") else code == source, file
      copied.append(file)
  assert copied == ["docs/examples/my_router.py"]


def test_tables_are_those_of_the_results_which_name_their_commit():
  for page in ("README.md", "docs/benchmarks.md", "docs/results.md"):
    text = (blocks.ROOT / page).read_text()
    assert "<!-- figures: " in text
    assert tables.rendered(text) == text, "python -m benchmarks.tables"
  for path in (blocks.ROOT / "benchmarks/results").glob("*.json"):
    result = json.loads(path.read_text())
    assert result.get("machine", result)["commit"], path
    for part in result.get("stages", {"": result}).values():
      assert all((row.get("peak_share") or 0) <= 1 for row in part["rows"])
