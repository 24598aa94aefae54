"""`python -m moh_jax tune-kernels`."""

import pathlib
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.cli import tune_kernels
from moh_jax.ops.kernels.backends import read
from moh_jax.ops.kernels.sizes import BlockSizes, Tile
from moh_jax.speed.tiles import Workload
from tests.cli import tiny_checkpoint
from tests.ops import devices


def _sizes(rows):
  return BlockSizes(*[Tile(rows, 64)] * 3)


class TuneKernelsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self._out = pathlib.Path(self.create_tempdir()) / "tiles.json"

  def _call(self, *argv, out=None, **tuned):
    """With a device and times that are made up; also what was measured."""
    with (
      devices.traced_for("gpu", "GPU X"),
      devices.with_triton(),
      mock.patch.object(tune_kernels, "tune", **tuned) as tune,
    ):
      out = self._out if out is None else out
      result = tiny_checkpoint.call("tune-kernels", "--out", out, *argv)
    return *result, tune

  def test_command_needs_a_device(self):
    with devices.traced_for("cpu"):
      status, _, err = tiny_checkpoint.call(
        *("tune-kernels", "--out", "none.json")
      )
    self.assertEqual(status, 2)
    self.assertIn("run on GPUs and TPUs, not on cpu", err)

  def test_what_was_measured_joins_what_the_file_had(self):
    argv = "--heads", 4, "--active", 3, "--head-dim"
    status, _, err, tune = self._call(
      *argv, 64, 72, side_effect=[_sizes(16), _sizes(32)]
    )
    self.assertEqual((status, err), (0, ""))
    workloads = [call.args for call in tune.call_args_list]
    expected = [
      (Workload(heads=4, active=3, head_dim=dim), "triton") for dim in (64, 72)
    ]
    self.assertEqual(workloads, expected)
    more = "--dtype", "float32"
    self._call(*argv, 64, *more, return_value=_sizes(64))
    self._call(*argv, 72, return_value=_sizes(128))
    entries = {
      ("triton", "GPU X", 64, "bfloat16"): _sizes(16),
      ("triton", "GPU X", 72, "bfloat16"): _sizes(128),
      ("triton", "GPU X", 64, "float32"): _sizes(64),
    }
    self.assertEqual(read(self._out), entries)

  @parameterized.parameters(
    ("--heads", 0, "at least 1"),
    ("--batch", 0, "at least 1"),
    ("--tokens", 0, "at least 1"),
    ("--rounds", 0, "at least 1"),
    ("--active", 17, "in [1, 16]"),
    ("--head-dim", 257, "in [1, 256]"),
  )
  def test_numbers_out_of_range_are_named(self, flag, value, allowed):
    status, _, err, tune = self._call(flag, value)
    self.assertEqual(status, 2)
    self.assertIn(f"error: {flag} {value} must be {allowed}", err)
    tune.assert_not_called()

  def test_no_head_dim_is_measured_if_another_is_wrong(self):
    status, _, _, tune = self._call("--head-dim", 64, 512)
    self.assertEqual(status, 2)
    tune.assert_not_called()

  def test_unknown_dtype_lists_the_known(self):
    status, _, err, _ = self._call("--dtype", "int8")
    self.assertEqual(status, 2)
    self.assertRegex(err, "int8.*bfloat16.*float16.*float32")

  def test_missing_folder_is_an_error_before_any_work(self):
    out = self._out.parent / "none" / "tiles.json"
    status, _, err, tune = self._call(out=out)
    self.assertEqual(status, 2)
    self.assertIn(f"error: --out '{out}': no directory {out.parent}", err)
    tune.assert_not_called()

  def test_another_file_is_an_error_before_any_work(self):
    self._out.write_text("not JSON")
    status, _, err, tune = self._call()
    self.assertEqual(status, 2)
    self.assertIn(f"{self._out} is not a file of block sizes", err)
    tune.assert_not_called()


if __name__ == "__main__":
  absltest.main()
