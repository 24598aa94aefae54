import dataclasses
import pathlib
import re
import sys

from absl.testing import parameterized

from moh_jax.runtime.steps import load_config
from tests import folders
from tests.cli import tiny_checkpoint

_DIGITS = str(pathlib.Path(__file__).parents[2] / "configs" / "vit_digits.py")


# Overrides of fields that a file states, leaves out, or sets to None.
_BY_TYPE = (
  ("train.init_from", "2024", "2024"), ("train.init_from", "none", "none"),
  ("data.path", "1e-3", "1e-3"), ("data.path", "a=b", "a=b"),
  ("model.router.kind", "none", "none"),
  ("optim.no_decay", "7,08,x/y", ("7", "08", "x/y")),
  ("optim.no_decay", "('a,b',\"c\")", ("a,b", "c")),
  ("optim.no_decay", "None", ("None",)), ("optim.no_decay", "", ()),
  ("optim.no_decay", " (*/bias, *norm*) ", ("*/bias", "*norm*")),
  ("model.image_size", "(64,32)", (64, 32)),
  ("model.image_size", "[64,32]", (64, 32)),
  ("model.image_size", "64,32", (64, 32)), ("model.image_size", "none", None),
  ("model.num_classes", "7", 7), ("optim.warmup_steps", "none", None),
  ("optim.lr", "1", 1.0),
  ("train.steps", "4", 4), ("eval.use_ema", "FALSE", False),
)  # fmt: skip


def _gives(value):
  return f"def get_config():\n  return {value}\n"


class LoadConfigTest(folders.FolderTest):
  def _file(self, content, name="mine"):
    path = self.root / f"{name}.py"
    path.write_text(content)
    return str(path)

  @parameterized.product(case=_BY_TYPE, states=(False, True))
  def test_override_is_read_by_the_type_of_its_field(self, case, states):
    key, text, value = case
    vit = {"model": {"family": "vit"}}
    path = _DIGITS if states else self._file(_gives(vit))
    found = load_config(path, [f"{key}={text}"])
    for part in key.split("."):
      found = getattr(found, part)
    self.assertEqual((type(found), found), (type(value), value))

  def test_one_side_is_a_square(self):
    config = load_config(_DIGITS, ["model.image_size=16"])
    self.assertEqual(config.model.image_size, (16, 16))

  def test_the_depth_of_other_packages_is_told_by_the_heads(self):
    path, message = (
      self._file(_gives({"model": {"family": "llm"}})),
      "num_heads",
    )
    for name in ("depth", "num_layers"):
      with self.assertRaisesRegex(ValueError, f"{name}; {message} has a value"):
        load_config(path, [f"model.{name}=3"])

  def test_later_overrides_win(self):
    config = load_config(_DIGITS, ["model.top_k=(1,2)", "model.top_k=0,3"])
    self.assertEqual(config.model.top_k, (0, 3))

  @parameterized.parameters(
    ("model.depth=3", "model.depth; did you mean 'depths'?; known: ["),
    ("model.num_head=1", "num_head; did you mean 'num_heads'?; known: ["),
    ("nope.x=1", "unknown config section 'nope'"),
    ("nope=1", "config key 'nope' must be SECTION.FIELD"),
    ("optim.lr", "'optim.lr' must be FIELD=VALUE"),
    ("train.steps=1.5", "train.steps=1.5 must be of type int"),
  )
  def test_bad_override_is_named(self, override, message):
    with self.assertRaisesRegex(ValueError, re.escape(message)):
      load_config(_DIGITS, [override])

  @parameterized.parameters(
    ("hello", "mine.py, line 1: NameError"),
    ("def get_config(:\n", "mine.py, line 1: SyntaxError"),
    ("def get_config():\n  x = 1\n  return x / 0\n", "line 3: ZeroDivision"),
    ("config = {}\n", "mine.py: has no function get_config"),
    ("def get_config():\n  {}\n", "returned None, must be a dict"),
    (
      _gives("{'model': {}, 'train': {'init_from': 2024}}"),
      "init_from=2024 must be of type",
    ),
    (_gives("{'model': {}, 'train': 5}"), "train=5 must be a section with"),
  )
  def test_error_names_file_and_line(self, content, text):
    with self.assertRaisesRegex(ValueError, text) as caught:
      load_config(self._file(content))
    self.assertNotIn("\n", str(caught.exception))

  def test_what_there_is_not_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nope.py: no such config"):
      load_config("configs/nope.py:s80")
    with self.assertRaisesRegex(ValueError, "big"):
      load_config(f"{self._file(_gives({}))}:big")

  def test_modules_beside_a_config_are_found(self):
    before = list(sys.path)
    parts = _gives({"model": {"family": "dit"}, "train": {"steps": 5}})
    self._file(parts, "parts_of_mine")
    file = self._file("from parts_of_mine import get_config\n")
    self.assertEqual(load_config(file).train.steps, 5)
    self.assertEqual(sys.path, before)


class ModelOfACheckpointTest(folders.FolderTest):
  """A file whose section `model` names no family."""

  def setUp(self):
    super().setUp()
    self.vit = tiny_checkpoint.stored("vit")

  def _load(self, source, *overrides, model="{}"):
    file = self.root / "finetune.py"
    file.write_text(_gives(f"{{'model': {model}, 'optim': {{'lr': 0.25}}}}"))
    start = f"train.init_from={source}"
    return load_config(str(file), [start, *overrides])

  def test_model_and_normalization_are_the_checkpoints(self):
    trained = tiny_checkpoint.CONFIG
    config = self._load(self.vit)
    left = dataclasses.replace(trained.model, num_classes=None)  # to the data
    self.assertEqual(config.model, left)
    self.assertEqual(config.data.mean, trained.data.mean)
    self.assertEqual(config.data.std, trained.data.std)
    self.assertEqual(config.optim.lr, 0.25)
    dit = tiny_checkpoint.stored("dit")
    found = self._load(dit, "diffusion.vb_weight=0.5").diffusion
    diffusion = tiny_checkpoint.DIT_CONFIG.diffusion
    self.assertEqual(found, dataclasses.replace(diffusion, vb_weight=0.5))

  def test_what_is_stated_stays(self):
    config = self._load(
      self.vit,
      "model.router.gate_form=paper",
      "data.mean=(0.1,0.2,0.3)",
      "model.image_size=(16,16)",
      model="{'drop_path': 0.25}",
    )
    self.assertEqual(config.model.router.gate_form, "paper")
    self.assertEqual(config.model.drop_path, 0.25)
    self.assertEqual(config.data.mean, (0.1, 0.2, 0.3))
    self.assertEqual(config.data.std, tiny_checkpoint.CONFIG.data.std)
    self.assertEqual(config.model.image_size, (16, 16))
    # The coordinates keep the pretraining's.
    self.assertEqual(config.model.pretrain_image_size, 8)

  @parameterized.parameters(
    ("train.init_from=", "train.init_from is ''"),
    ("train.init_from=/nope", "/nope holds no checkpoint"),
    ("sample.steps=4", "section 'sample' for model.family='vit'"),
  )
  def test_bad_start_is_named(self, override, message):
    with self.assertRaisesRegex((ValueError, OSError), message):
      self._load(self.vit, override)
