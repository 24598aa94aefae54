"""Tiles: exact for local functions, linear at seams, one shape for all."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.models.vae import apply_tiled


def _array(rows, columns):
  x = np.random.default_rng(0).normal(size=(2, rows, columns, 3))
  return x.astype(np.float32)


def _halve(x):
  """Local: means of 2 x 2 pixels, and their negatives."""
  batch, rows, columns, channels = x.shape
  cut = x.reshape(batch, rows // 2, 2, columns // 2, 2, channels)
  return jnp.asarray(cut.mean((2, 4))), -jnp.asarray(cut.mean((2, 4)))


def _double(x):
  return jnp.asarray(x).repeat(2, 1).repeat(2, 2)


def _level(x):
  """Each tile as one constant, the smallest column number it was given."""
  return jnp.full((1, *x.shape[1:3], 1), float(x.min()))


class TilingTest(parameterized.TestCase):
  @parameterized.product(
    sides=((12, 12), (26, 12), (14, 40)), overlap=(0, 2, 8)
  )
  def test_equals_the_whole_for_local_functions(self, sides, overlap):
    x = _array(*sides)
    moments = apply_tiled(_halve, x, 12, overlap)
    for got, want in zip(moments, _halve(x)):
      self.assertEqual(got.dtype, np.float32)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    decoded = apply_tiled(_double, x, 12, overlap)
    np.testing.assert_allclose(decoded, _double(x), rtol=1e-5, atol=1e-6)

  @parameterized.parameters((12, 12), (8, 5))
  def test_one_tile_is_the_function_itself(self, rows, columns):
    x, seen = _array(rows, columns), []

    def record(part):
      seen.append(part.shape)
      return jnp.tanh(part)

    np.testing.assert_array_equal(apply_tiled(record, x, 12, 4), jnp.tanh(x))
    self.assertEqual(seen, [x.shape])

  def test_all_tiles_have_one_shape(self):
    seen = []

    def record(part):
      seen.append(part.shape)
      return part

    apply_tiled(record, _array(30, 7), 12, 4)
    self.assertEqual(seen, [(2, 12, 7, 3)] * 4)

  def test_seam_is_a_linear_ramp(self):
    # Two tiles of 12 columns, starting at 0 and 8, share 4.
    x = np.broadcast_to(np.arange(20.0)[None, None, :, None], (1, 3, 20, 1))
    out = apply_tiled(_level, x, 12, 4)
    row = np.concatenate([np.zeros(8), np.arange(1, 8, 2), np.full(8, 8.0)])
    want = np.broadcast_to(row[None, None, :, None], out.shape)
    np.testing.assert_allclose(out, want, atol=1e-5)

  @parameterized.parameters(2, 6, 9)
  def test_steps_are_bounded_by_the_overlap(self, overlap):
    x = np.broadcast_to(np.arange(50.0)[None, :, None, None], (1, 50, 50, 1))
    out = apply_tiled(_level, x, 12, overlap)
    steps = np.diff(out[0, :, 0, 0])
    # Neighbours differ by at most 12 - overlap, over at least `overlap`; where
    # they share more than half, over as much as they differ.
    self.assertLessEqual(steps.max(), max(1, (12 - overlap) / overlap) + 1e-4)
    self.assertGreaterEqual(steps.min(), -1e-4)
    np.testing.assert_allclose(out[:, :, :1], out[:, :, -1:], atol=1e-4)

  @parameterized.parameters((12, 12), (12, -1), (0, 0))
  def test_overlap_out_of_range_is_refused(self, tile, overlap):
    with self.assertRaisesRegex(ValueError, f"overlap={overlap} must be in"):
      apply_tiled(_double, _array(16, 16), tile, overlap)

  @parameterized.parameters((21, 4), (20, 3))
  def test_sizes_between_the_latents_are_refused(self, columns, overlap):
    with self.assertRaisesRegex(ValueError, "must be multiples of 2"):
      apply_tiled(_halve, _array(16, columns), 12, overlap)


if __name__ == "__main__":
  absltest.main()
