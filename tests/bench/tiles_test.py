"""Which tiles of the kernels are chosen."""

from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.bench import tiles
from moh_jax.ops.kernels import gpu
from moh_jax.ops.kernels.sizes import Tile


class TuningTest(parameterized.TestCase):
  @parameterized.parameters(("gpu", 2), ("tpu", 1))
  def test_chooses_among_tiles(self, platform, count):
    workload = tiles.Workload(1, 16, 2, 1, 16, "float32")
    known = [Tile(16, 16), Tile(16, 8)][:count]
    lines = []
    best = tiles.tune(
      workload, platform, known, repeats=1, interpret=True, report=lines.append
    )
    self.assertContainsSubset((best.forward, best.dq, best.dkv), known)
    self.assertLen(lines, 3 * count)

  def test_tiles_that_do_not_run_are_passed_over(self):
    workload = tiles.Workload(1, 16, 2, 1, 16, "float32")
    known = [Tile(16, 16)]
    too_large = RuntimeError("too large")
    with mock.patch.object(gpu, "forward", side_effect=too_large):
      with self.assertRaisesRegex(ValueError, "none of 1 tiles .*too large"):
        tiles.tune(workload, "gpu", known, repeats=1, interpret=True)


if __name__ == "__main__":
  absltest.main()
