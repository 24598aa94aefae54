"""`bench --target`: what compilers tell of devices that are not here."""

import json

import pytest
from absl.testing import absltest, parameterized

from moh_jax.runtime.devices import missing_packages
from tests.cli import tiny_checkpoint

pytestmark = pytest.mark.compiles

_SHAPE = "--lengths 512 --shares 50 --heads 4 --dtype bfloat16".split()


class TargetTest(parameterized.TestCase):
  def _rows(self, op, target, *argv):
    if missing := missing_packages(target):
      self.skipTest(f"needs {missing}")
    status, out, err = tiny_checkpoint.call(
      *("bench", op, "--target", target, *_SHAPE, *argv, "--json", "-")
    )
    self.assertEqual((status, err), (0, ""))
    rows = json.loads(out)["rows"]
    for row in rows:
      self.assertFalse(row["measured"])
      self.assertIsNone(row["ms"])
      self.assertGreater(row["flops"], 0)
      self.assertGreater(row["peak_bytes"], row["temporary_bytes"])
      self.assertGreater(row["moved_bytes"], 0)
    return rows

  @parameterized.parameters(
    ("h100", "forward", "fmha"), ("h100", "causal", "triton"),
    ("a100", "forward", "fmha"), ("v5e:2x2", "causal", "tpu_custom_call"),
    ("v6e:2x2", "forward_backward", "tpu_custom_call"),
  )  # fmt: skip
  def test_active_heads_are_computed_by_kernels(self, target, mode, kernel):
    rows = self._rows("attention", target, "--modes", mode)
    packed = [row for row in rows if not row["every_head"]]
    names = {name for row in packed for name in row["kernels"]}
    self.assertTrue([name for name in names if kernel in name], names)

  def test_cudnn_is_a_baseline_that_computes_every_head(self):
    rows = self._rows("attention", "h100", "--modes", "forward")
    found = {
      (row["share"], row["every_head"])
      for row in rows
      if any("fmha" in name for name in row["kernels"])
    }
    self.assertEqual(found, {(1.0, True), (0.5, False)})

  @parameterized.product(op=("layer", "decode"), target=("h100", "v5e:2x2"))
  def test_other_benchmarks_compile_too(self, op, target):
    self.assertTrue([r for r in self._rows(op, target) if r["kernels"]])


if __name__ == "__main__":
  absltest.main()
