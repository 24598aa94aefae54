"""Relative coordinates, pooling bins, sines and cosines."""

import fractions
import functools
import math
import pathlib

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.convert.tensor_files import read_tensors
from moh_jax.ops.position import (
  pooling_bins,
  relative_coordinates,
  sincos_2d,
  sinusoidal,
)

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@functools.cache
def _recorded(case: str) -> dict[str, np.ndarray]:
  with np.load(_GOLDENS / case / "io.npz") as stored:
    return dict(stored)


def _coordinate(query: int, key_bin: list[int], pretrain: int) -> float:
  """One axis of one pair, from the formula, with an exact bin centre."""
  centre = fractions.Fraction(sum(key_bin), len(key_bin))
  distance = float(query - centre) / max(pretrain - 1, 1) * 8
  return math.copysign(math.log2(1 + abs(distance)) / 3, distance)


def _bins(size: int, bins: int) -> list[list[int]]:
  """Adaptive average pooling's positions per bin."""
  starts = [math.floor(i * size / bins) for i in range(bins)]
  stops = [math.ceil((i + 1) * size / bins) for i in range(bins)]
  return [list(range(a, b)) for a, b in zip(starts, stops)]


class PoolingBinsTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 1), (4, 4), (8, 2), (7, 2), (7, 3), (5, 4), (10, 7), (14, 5), (9, 1)
  )
  def test_equals_adaptive_average_pooling(self, size, bins):
    expected = np.zeros((bins, size))
    for row, members in enumerate(_bins(size, bins)):
      expected[row, members] = 1 / len(members)
    matrix = pooling_bins(size, bins)
    chex.assert_shape(matrix, (bins, size))
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1.0, rtol=1e-12)

  @parameterized.parameters((4, 0), (4, 5), (0, 1))
  def test_rejects_bins_outside_the_positions(self, size, bins):
    with self.assertRaisesRegex(ValueError, rf"bins={bins} .*\[1, {size}\]"):
      pooling_bins(size, bins)


class RelativeCoordinatesTest(parameterized.TestCase):
  @parameterized.product(
    case=("moh_vit_tiny", "transnext_tiny"),
    stage=((1, 16, 2), (2, 8, 2), (3, 4, 2), (4, 2, 2)),
  )
  def test_equals_recorded_coordinates_of_every_pair(self, case, stage):
    number, size, keys = stage
    arrays = _recorded(case)
    table = arrays[f"relative_coords_table{number}"]
    recorded = table[arrays[f"relative_pos_index{number}"]]
    ours = relative_coordinates((size, size), (keys, keys))
    pairs = np.asarray(ours.table)[ours.index].reshape(recorded.shape)
    np.testing.assert_allclose(pairs, recorded, atol=1e-6)

  @parameterized.parameters(
    ("vit_pooled_shared_routed", (8, 12), (2, 3)),
    ("vit_full_shared_routed", (5, 7), (5, 7)),
  )
  def test_equals_recorded_oblong_grids(self, case, queries, keys):
    arrays = _recorded(case)
    recorded = arrays["relative_coords_table"][arrays["relative_pos_index"]]
    ours = relative_coordinates(queries, keys)
    pairs = np.asarray(ours.table)[ours.index].reshape(recorded.shape)
    np.testing.assert_allclose(pairs, recorded, atol=1e-6)

  @parameterized.parameters(
    ((4, 6), (2, 3), None),
    ((5, 7), (2, 3), None),
    ((5, 7), (5, 7), (9, 9)),
    ((3, 4), (2, 4), (2, 8)),
    ((1, 5), (1, 2), None),
    ((4, 1), (2, 1), (1, 1)),
  )
  def test_equals_the_formula_pair_by_pair(self, queries, keys, pretrain):
    ours = relative_coordinates(queries, keys, pretrain)
    sizes = pretrain or queries
    bins = [_bins(size, count) for size, count in zip(queries, keys)]
    expected = [
      [
        [
          _coordinate(q[axis], bins[axis][k[axis]], sizes[axis])
          for axis in range(2)
        ]
        for k in np.ndindex(*keys)
      ]
      for q in np.ndindex(*queries)
    ]
    pairs = np.asarray(ours.table)[ours.index]
    np.testing.assert_allclose(pairs, expected, atol=1e-6)

  @parameterized.parameters(
    ((1, 1), (1, 1)), ((1, 6), (1, 3)), ((6, 1), (3, 1))
  )
  def test_axis_of_one_token_has_the_finite_coordinate_zero(self, grid, keys):
    table = np.asarray(relative_coordinates(grid, keys).table)
    chex.assert_tree_all_finite(table)
    axis = grid.index(1)
    np.testing.assert_array_equal(table[:, axis], 0.0)

  def test_shapes_dtypes_and_distinct_rows(self):
    ours = relative_coordinates((4, 6), (2, 3))
    chex.assert_shape(ours.index, (24, 6))
    chex.assert_type([ours.table, ours.index], [np.float32, np.int32])
    self.assertLen(np.unique(ours.table, axis=0), len(ours.table))
    np.testing.assert_array_equal(
      np.unique(ours.index), np.arange(len(ours.table))
    )

  def test_pretraining_grid_sets_the_unit(self):
    plain = relative_coordinates((7, 7), (7, 7))
    other = relative_coordinates((7, 7), (7, 7), (4, 4))
    np.testing.assert_allclose(np.abs(plain.table).max(), np.log2(9) / 3)
    np.testing.assert_allclose(np.abs(other.table).max(), np.log2(17) / 3)


class Sincos2dTest(parameterized.TestCase):
  @parameterized.parameters(((2, 3), 8), ((1, 1), 4), ((5, 2), 12))
  def test_equals_the_formula_value_by_value(self, grid, width):
    table = sincos_2d(grid, width)
    chex.assert_shape(table, (grid[0] * grid[1], width))
    chex.assert_type(table, np.float32)
    quarter = width // 4
    for row, column in np.ndindex(*grid):
      expected = [
        wave(place / 10000 ** (k / quarter))
        for place in (column, row)
        for wave in (math.sin, math.cos)
        for k in range(quarter)
      ]
      np.testing.assert_allclose(
        table[row * grid[1] + column], expected, atol=1e-6
      )

  @parameterized.parameters("moh_dit_tiny", "dit_tiny")
  def test_equals_the_recorded_table(self, case):
    weights = read_tensors(_GOLDENS / case / "weights.safetensors")
    recorded = weights["pos_embed"][0]
    side = math.isqrt(len(recorded))
    table = sincos_2d((side, side), recorded.shape[1])
    np.testing.assert_allclose(table, recorded, atol=1e-6)

  def test_places_of_a_large_grid_are_distinct(self):
    table = sincos_2d((32, 32), 384)
    self.assertLen(np.unique(table.round(4), axis=0), 32 * 32)


class SinusoidalTest(parameterized.TestCase):
  @parameterized.parameters(
    (np.int32([0, 1, 999]), 256), (np.float32([0.5, 37.25]), 6)
  )
  def test_equals_the_formula_cosines_first(self, t, width):
    features = sinusoidal(jnp.asarray(t), width)
    chex.assert_shape(features, (len(t), width))
    chex.assert_type(features, jnp.float32)
    half = width // 2
    angles = np.outer(t, 10000.0 ** -(np.arange(half) / half))
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    # Angles near 1000 are float32.
    np.testing.assert_allclose(features, expected, atol=2e-4)

  def test_timestep_zero_is_ones_and_zeros(self):
    features = sinusoidal(jnp.zeros(1, jnp.int32), 8)
    np.testing.assert_array_equal(features, [[1.0] * 4 + [0.0] * 4])


if __name__ == "__main__":
  absltest.main()
