"""The tables of docs/help.md, docs/resume.md and docs/contributing.md hold."""

import copy
import pathlib
import re
import sys
import tomllib

import pytest

from moh_jax.cli import main
from moh_jax.models.registry import make_model  # noqa: F401, before the errors
from moh_jax.runtime import checkpoint, run_lock
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.entrance import check_same_run
from tests.cli import tiny_checkpoint
from tests.docs import blocks
from tests.inference import tiny_text_model
from tests.training import tiny

_PROJECT = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())
_IMAGE = blocks.ROOT / "docs/digits/3.png"
_DIVERGES = ("optim.lr=1e9", "optim.warmup_steps=0", "optim.clip_norm=0")


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


def _call(*argv):
  return tiny_checkpoint.call(*argv)[2]


def _train(*options, workdir="w"):
  config = f"{blocks.ROOT}/tests/faults/tiny_run.py:llm"
  keys = [f"--config.{option}" for option in options]
  return _call("train", "--config", config, "--workdir", workdir, *keys)


def _trained(*options):
  """A further start of a run of two steps."""
  if not pathlib.Path("done").exists():
    _train("train.steps=2", workdir="done")
  return _train(*options, workdir="done")


def _damaged():
  tiny_checkpoint.save("damaged")
  file = next(pathlib.Path("damaged/checkpoints/0/params/d").iterdir())
  file.write_bytes(file.read_bytes()[::-1])
  return _call("classify", "--checkpoint=damaged", _IMAGE)


def _locked():
  pathlib.Path("w").mkdir(exist_ok=True)
  lock = run_lock.RunLock("w")
  lock.take()
  try:
    return _train()
  finally:
    lock.release()


def _lacking(library):
  tiny_text_model.save(pathlib.Path("text"))
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, library, None)
    return _call("evaluate", "--checkpoint=text", "--tasks=piqa")


def _full():
  def fail():
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  main.report_errors(fail, False)
  return ""


# What causes each error of the table, in its order.
_CAUSES = (
  lambda: _train("optim.warmup_step=1"),
  lambda: _train("mesh.fsdp=3"),
  lambda: _train("data.batch_size=30"),
  lambda: _train("mesh.tensor=4"),
  _full,
  lambda: _trained("train.steps=3", "train.seed=1"),
  lambda: _trained("train.steps=1", "optim.warmup_steps=0"),
  _locked,
  lambda: _train(*_DIVERGES, workdir="n"),
  lambda: _call("classify", "--checkpoint=no", _IMAGE),
  _damaged,
  lambda: _call(
    *("train", "--config", blocks.ROOT / "configs/vit.py:s80", "--workdir=v"),
    "--config.data.path=no",
  ),
  lambda: _lacking("lm_eval"),
)


def test_frequent_errors_are_worded_so(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  rows = _rows("help.md", "## Frequent errors")
  assert len(rows) == len(_CAUSES)
  for (error, _, _), cause in zip(rows, _CAUSES):
    worded = re.match(r"`([^`]*)`", error)[1]
    pattern = ".*".join(map(re.escape, worded.split("...")))
    said = cause() + capsys.readouterr().err
    assert re.search(rf"^error: {pattern}", said, re.MULTILINE), (error, said)


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
_ZEROS = ("optim.b1", "optim.clip_norm", "optim.ema_decay")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  """Checkpoints of step 0 of each family's tiny run, without parameters."""
  found = []
  for name in ("config", "dit_config", "llm_config"):
    folder = tmp_path_factory.mktemp(name)
    config = getattr(tiny, name)()
    checkpoint.save_params(folder, {"w": 0.0}, Metadata(config))
    data = folder / "checkpoints/0/data"
    data.mkdir()
    (data / "metadata").write_text('{"position": 0}')
    found.append((folder, config))
  return found


def _refusals(stored, key, value):
  """How the runs that have a key answer another value of it."""
  section, _, field = key.partition(".")
  if not field:
    field, value = value
  for folder, config in stored:
    values = config.by_name().get(section)
    if not hasattr(values, field):
      continue
    changed = copy.copy(config)
    values = copy.copy(values)
    object.__setattr__(values, field, value)
    if section in config.sections:
      sections = {**config.sections, section: values}
      object.__setattr__(changed, "sections", sections)
    else:
      object.__setattr__(changed, section, values)
    try:
      check_same_run(folder, 0, Metadata(changed), {}, verify=False)
      yield ""
    except ValueError as error:
      yield str(error)


def test_a_resumed_run_may_change_what_the_page_says(stored):
  may = " ".join(row[0] for row in _rows("resume.md", "## What may change"))
  must = _rows("resume.md", "## What is refused")
  must = " ".join(row[0] for row in must if "other data" not in row[0])
  may, must = (set(re.findall(r"`([a-z0-9_.]+)`", x)) for x in (may, must))
  zeros = {key for key in must if key in _ZEROS}
  assert zeros == set(_ZEROS)
  may -= {"b1", "clip_norm", "ema_decay", "0"}
  for key in sorted(may):
    found = list(_refusals(stored, key, _VALUES.get(key, 1)))
    # 0 is what some of the runs have, and it stays.
    assert "" in found if key in _ZEROS else found and not any(found), key
  for key in sorted(must - {"train.steps"}):  # no fewer than are done
    value = 0 if key in zeros else _VALUES.get(key, "other")
    found = [bool(x) for x in _refusals(stored, key, value)]
    assert any(found) if key in zeros else found and all(found), key
  text = (blocks.ROOT / "docs/resume.md").read_text()
  for section in ("optim", "train", "data"):
    for _, config in stored:
      for field in vars(getattr(config, section)):
        assert f"`{section}.{field}`" in text, (section, field)
  for _, config in stored:
    for field in config.model.RUNTIME_FIELDS:
      assert f"`model.{field}`" in text, field
