"""`python -m moh_jax tune-kernels`."""

import unittest

import jax
from absl.testing import absltest

from tests.cli import tiny_checkpoint


class TuneKernelsTest(absltest.TestCase):
  @unittest.skipIf(
    jax.devices()[0].platform in ("gpu", "tpu"), "there is a GPU or TPU"
  )
  def test_command_needs_a_device(self):
    status, _, err = tiny_checkpoint.call("tune-kernels", "--out", "none.json")
    self.assertEqual(status, 2)
    self.assertIn("run on GPUs and TPUs, not on cpu", err)


if __name__ == "__main__":
  absltest.main()
