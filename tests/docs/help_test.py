"""The tables of docs/help.md, docs/resume.md and docs/contributing.md hold."""

import copy
import re
import tomllib

import pytest

from moh_jax.runtime import checkpoint
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.entrance import check_same_run
from tests.docs import blocks
from tests.training import tiny

_PROJECT = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())


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
  "diffusion.loss_weight": "min_snr",
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
_ZEROS = {"optim.b1", "optim.clip_norm", "optim.ema_decay"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  """Checkpoints of step 0 of each family's tiny run, without parameters."""
  found = []
  for config in (tiny.config(), tiny.dit_config(), tiny.llm_config()):
    folder = tmp_path_factory.mktemp("run")
    checkpoint.save_params(folder, {"w": 0.0}, Metadata(config))
    data = folder / "checkpoints/0/data"
    data.mkdir()
    (data / "metadata").write_text('{"position": 0}')
    found.append((folder, config))
  return found


def _refused(stored, key, value):
  """Whether the runs that have a key refuse another value of it."""
  section, _, field = key.partition(".")
  if not field:
    field, value = value
  for folder, config in stored:
    changed = copy.deepcopy(config)
    values = changed.by_name().get(section)
    if hasattr(values, field):
      object.__setattr__(values, field, value)
      try:
        check_same_run(folder, 0, Metadata(changed), {}, verify=False)
        yield False
      except ValueError:
        yield True


def test_a_resumed_run_may_change_what_the_page_says(stored):
  may = " ".join(row[0] for row in _rows("resume.md", "## What may change"))
  must = _rows("resume.md", "## What is refused")
  must = " ".join(row[0] for row in must if "other data" not in row[0])
  may, must = (set(re.findall(r"`([a-z0-9_.]+)`", x)) for x in (may, must))
  assert must >= _ZEROS
  for key in sorted(may - _ZEROS - {"b1", "clip_norm", "ema_decay"}):
    found = list(_refused(stored, key, _VALUES.get(key, 1)))
    assert found and not any(found), key
  for key in sorted(must - _ZEROS - {"train.steps"}):
    found = list(_refused(stored, key, _VALUES.get(key, "other")))
    assert found and all(found), key
  for key in sorted(_ZEROS):  # 0 is what some of the runs have, and it stays
    assert not all(_refused(stored, key, 1)), key
    assert any(_refused(stored, key, 0)), key
  text = (blocks.ROOT / "docs/resume.md").read_text()
  for _, config in stored:
    for section in ("optim", "train", "data"):
      for field in vars(getattr(config, section)):
        assert f"`{section}.{field}`" in text, (section, field)
    for field in config.model.RUNTIME_FIELDS:
      assert f"`model.{field}`" in text, field


if __name__ == "__main__":
  pytest.main([__file__])
