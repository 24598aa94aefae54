import argparse
import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from moh_jax.cli import common

_DIGITS = str(pathlib.Path(__file__).parents[2] / "configs" / "vit_digits.py")


class IntTupleTest(parameterized.TestCase):
  @parameterized.parameters(
    ("3", (3,)), ("0,0,6,12", (0, 0, 6, 12)), ("1, 2", (1, 2))
  )
  def test_parses(self, text, expected):
    self.assertEqual(common.int_tuple(text), expected)

  @parameterized.parameters("", "a", "1,,2", "1.5")
  def test_refuses(self, text):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, "integers"):
      common.int_tuple(text)


class LoadConfigTest(parameterized.TestCase):
  def _file(self, content, name="mine.py"):
    where = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(where) / name
    path.write_text(content)
    return str(path)

  @parameterized.parameters(
    ("optim.lr=3e-4", "optim", "lr", 3e-4),
    ("optim.lr=1", "optim", "lr", 1.0),
    ("model.top_k=(1,2)", "model", "top_k", (1, 2)),
    ("model.top_k=[1,2]", "model", "top_k", (1, 2)),
    ("data.path=some/where", "data", "path", "some/where"),
    ("data.path=a=b", "data", "path", "a=b"),
    ("checkpoint.async_save=False", "checkpoint", "async_save", False),
  )
  def test_override_sets_its_field(self, override, section, field, value):
    config = common.load_config(_DIGITS, [override])
    self.assertEqual(getattr(getattr(config, section), field), value)

  def test_overrides_apply_in_order(self):
    config = common.load_config(_DIGITS, ["train.steps=60", "train.steps=70"])
    self.assertEqual(config.train.steps, 70)

  @parameterized.parameters(
    ("optim.nope=1", "unknown config key optim.nope"),
    (
      "model.gate_form=paper",
      "unknown config key model.gate_form; it is now model.router.gate_form",
    ),
    ("model.router=none", "model.router='none' must be a section with the"),
    ("nope=1", "unknown config key nope"),
    ("optim.lr.x=1", "unknown config key optim.lr.x"),
    ("optim.lr", "'optim.lr' must be FIELD=VALUE"),
    ("optim.lr=fast", "optim.lr='fast' must be of type float"),
    ("train.steps=0", "train.steps=0 must be at least 1"),
    ("train.steps=1.5", "train.steps=1.5 must be of type int"),
    ("optim=3", "optim"),
  )
  def test_bad_override_is_named(self, override, message):
    with self.assertRaises(ValueError) as caught:
      common.load_config(_DIGITS, [override])
    self.assertIn(message, str(caught.exception))

  def test_missing_file_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nope.py: no such config"):
      common.load_config("configs/nope.py:s80")

  @parameterized.named_parameters(
    ("no_python_file", "hello", "mine.txt"),
    ("no_get_config", "x = 1\n", "mine.py"),
    ("no_config_dict", "def get_config(): return 3\n", "mine.py"),
  )
  def test_file_that_is_no_config_is_named(self, content, name):
    path = self._file(content, name)
    with self.assertRaises(ValueError) as caught:
      common.load_config(path)
    self.assertIn(name, str(caught.exception))

  def test_argument_that_the_file_does_not_take_is_named(self):
    path = self._file("def get_config():\n  return {}\n")
    with self.assertRaisesRegex(ValueError, "big"):
      common.load_config(f"{path}:big")


class WriteJsonTest(absltest.TestCase):
  def test_minus_prints_one_line(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      common.write_json("-", {"a": [1, 2], "b": {"c": 0.5}})
    self.assertEqual(out.getvalue(), '{"a": [1, 2], "b": {"c": 0.5}}\n')

  def test_file_holds_the_value(self):
    where = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(where) / "figures.json"
    common.write_json(str(path), [{"a": 1}])
    self.assertEqual(json.loads(path.read_text()), [{"a": 1}])

  def test_nowhere_prints_nothing(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      common.write_json("", {"a": 1})
    self.assertEmpty(out.getvalue())


class TableTest(absltest.TestCase):
  def test_columns_are_aligned(self):
    text = common.table([("a", 100), ("long", 2)], ("name", "n"))
    self.assertEqual(text, "name  n\na     100\nlong  2")


if __name__ == "__main__":
  absltest.main()
