"""Heads side by side in vector lanes."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.head_layout import (
  fill_lanes,
  heads_in_lanes,
  in_place,
  on_tpu,
  over_lanes,
)
from tests.ops import devices


class LanesTest(parameterized.TestCase):
  @parameterized.parameters(
    ((16, 64), 2),
    ((12, 32), 4),
    ((8, 16), 8),
    ((16, 128), 1),
    ((16, 256), 1),
    ((16, 72), 1),  # does not divide 128
    ((3, 64), 1),  # one head would be left over
  )
  def test_heads_that_fill_the_lanes(self, sizes, expected):
    self.assertEqual(heads_in_lanes(*sizes), expected)

  def test_neighbours_share_a_row(self):
    x = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    expected = [[[*a, *b], [*c, *d]] for a, b, c, d in x]
    np.testing.assert_array_equal(fill_lanes(jnp.asarray(x), 2), expected)

  def test_lanes_of_a_place(self):
    got = in_place(jnp.array([1, 0]), 2, 3)
    np.testing.assert_array_equal(got, [[0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]])

  @parameterized.parameters(1, 2, 4)
  def test_one_number_over_the_lanes_of_its_head(self, count):
    gates = jnp.asarray(np.random.default_rng(0).random((2, 3, 4)), jnp.float32)
    got = fill_lanes(jnp.ones((2, 3, 4, 5)), count) * over_lanes(
      gates, count, 5
    )
    expected = np.repeat(gates, 5, axis=-1).reshape(got.shape)
    np.testing.assert_array_equal(got, expected)

  def test_the_device_is_that_of_the_mesh(self):
    with devices.traced_for("tpu"):
      self.assertTrue(on_tpu())
    with devices.traced_for("gpu"):
      self.assertFalse(on_tpu())


if __name__ == "__main__":
  absltest.main()
