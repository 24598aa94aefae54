import argparse
import contextlib
import io
import json
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.cli import common, distributed, fields
from moh_jax.cli.arguments import COMMANDS
from moh_jax.cli.overrides import split_overrides
from moh_jax.config import MeshConfig


class IntTupleTest(parameterized.TestCase):
  @parameterized.parameters(
    ("3", (3,)), ("0,0,6,12", (0, 0, 6, 12)), ("1, 2", (1, 2))
  )
  def test_parses(self, text, expected):
    self.assertEqual(fields.int_tuple(text), expected)

  @parameterized.parameters("", "a", "1,,2", "1.5")
  def test_refuses(self, text):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, "integers"):
      fields.int_tuple(text)


class MeshTest(parameterized.TestCase):
  def test_axes_that_are_not_named_have_one_device(self):
    mesh = common.mesh_config("fsdp=-1,dcn_data=2")
    self.assertEqual(mesh, MeshConfig(data=1, fsdp=-1, dcn_data=2))

  @parameterized.parameters("max_imbalance=2", "max_whole=0", "fsdp=x")
  def test_what_is_no_axis_is_refused(self, text):
    with self.assertRaisesRegex(argparse.ArgumentTypeError, "with axes data"):
      common.mesh_config(text)


class HelpTest(parameterized.TestCase):
  @parameterized.parameters(
    ("evaluate-lm", "texts at a time (default: 8)"),
    ("generate", "texts at a time (default: 8)"),
    ("show-batch", "images of it (default: 32)"),
  )
  def test_says_the_default(self, command, text):
    parser = argparse.ArgumentParser()
    COMMANDS[command](parser)
    self.assertIn(text, " ".join(parser.format_help().split()))


class SplitOverridesTest(parameterized.TestCase):
  @parameterized.parameters(
    (("--config.optim.lr=3e-4",), ["optim.lr=3e-4"]),
    (("--config.optim.lr", "3e-4"), ["optim.lr=3e-4"]),
    (("--config.data.path=a=b",), ["data.path=a=b"]),
    (("--config.a.b=1", "--config.a.b", "-2"), ["a.b=1", "a.b=-2"]),
  )
  def test_takes_them_out_in_order(self, argv, expected):
    argv = ["--config=x.py", *argv, "--workdir", "y"]
    others, overrides = split_overrides(argv)
    self.assertEqual(others, ["--config=x.py", "--workdir", "y"])
    self.assertEqual(overrides, expected)

  @parameterized.parameters(
    (("--config.optim.lr",),), (("--config.optim.lr", "--workdir=x"),)
  )
  def test_value_must_be_given(self, argv):
    with self.assertRaisesRegex(ValueError, "--config.optim.lr needs a value"):
      split_overrides(argv)


class ProcessesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"process_id": 1, "json": "b"}, True),
    ({"seed": 1}, False),
    ({"mesh": MeshConfig(fsdp=2)}, False),
  )
  def test_processes_of_a_run_have_the_same_options(self, changes, same):
    given = {"process_id": 0, "json": "a", "seed": 0, "mesh": MeshConfig()}
    given["labels"] = (1, 2)
    told = [distributed._compared(x) for x in (given, {**given, **changes})]
    self.assertEqual(told[0] == told[1], same)
    self.assertEqual(json.loads(json.dumps(told)), told)

  def test_a_newer_checkpoint_matters_where_no_step_is_given(self):
    newest = iter([[100], [200]])
    with mock.patch.object(
      distributed.steps, "list_steps", lambda _: next(newest)
    ):
      given = {"checkpoint": "run", "step": None}
      told = [distributed._compared(given) for _ in range(2)]
      self.assertNotEqual(*told)
      given["step"] = 100
      self.assertEqual(*[distributed._compared(given) for _ in range(2)])


class WriteJsonTest(parameterized.TestCase):
  def test_minus_prints_one_line(self):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      common.write_json("-", {"a": [1, 2], "b": {"c": 0.5}})
    self.assertEqual(out.getvalue(), '{"a": [1, 2], "b": {"c": 0.5}}\n')

  def test_file_holds_the_value(self):
    where = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(where) / "metrics.json"
    common.write_json(str(path), [{"a": 1}])
    self.assertEqual(json.loads(path.read_text()), [{"a": 1}])

  @parameterized.parameters("-", "metrics.json")
  def test_json_has_null_where_a_number_is_not_finite(self, target):
    where = self.enterContext(tempfile.TemporaryDirectory())
    path = target if target == "-" else os.path.join(where, target)
    nan, inf = float("nan"), np.float64("inf")
    value = {"loss": nan, "rows": [{"a": (inf, -inf, 1.5)}], "name": "NaN"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
      common.write_json(path, value)
    text = out.getvalue() if target == "-" else pathlib.Path(path).read_text()
    self.assertEqual(
      json.loads(text, parse_constant=self.fail),
      {"loss": None, "rows": [{"a": [None, None, 1.5]}], "name": "NaN"},
    )

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
