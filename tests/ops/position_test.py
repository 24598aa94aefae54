"""Relative coordinates, pooling bins, sines and cosines, rotations."""

import math
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.llm import ROPE_SCALINGS, RotaryConfig
from moh_jax.ops.position import pooling_bins, relative_coordinates, rotation

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


class PoolingBinsTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, 1), (4, 4), (8, 2), (7, 2), (7, 3), (5, 4), (10, 7), (14, 5), (9, 1)
  )
  def test_equals_adaptive_average_pooling(self, size, bins):
    matrix = pooling_bins(size, bins)
    chex.assert_shape(matrix, (bins, size))
    for i, row in enumerate(matrix):
      start, stop = (
        math.floor(i * size / bins),
        math.ceil((i + 1) * size / bins),
      )
      inside = (np.arange(size) >= start) & (np.arange(size) < stop)
      np.testing.assert_allclose(row, inside / (stop - start), rtol=1e-12)


class RelativeCoordinatesTest(parameterized.TestCase):
  def test_another_size_keeps_the_recorded_coordinates(self):
    # Recorded for 5 x 7 tokens; the same model on 9 x 12.
    path = _GOLDENS / "vit_full_shared_routed" / "io.npz"
    with np.load(path) as stored:
      case = dict(stored)
    table, pairs = case["relative_coords_table"], case["relative_pos_index"]
    recorded = table[pairs].reshape(5, 7, 5, 7, 2)
    ours = relative_coordinates((9, 12), (9, 12), (5, 7))
    larger = ours.table[ours.index].reshape(9, 12, 9, 12, 2)
    for down, right in ((0, 0), (4, 0), (2, 5)):
      part = (slice(down, down + 5), slice(right, right + 7))
      np.testing.assert_allclose(larger[part + part], recorded, atol=1e-6)


_ROPE = {
  name: RotaryConfig(theta=100.0, scaling=name, **fields)
  for name, fields in {
    "none": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_length": 12},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_length": 60},
    "yarn": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5,
             "truncate": False, "original_length": 60},
  }.items()
}  # fmt: skip
_DIM = 16


def _frequencies(config: RotaryConfig, length: int) -> np.ndarray:
  """Radians a token, pair by pair, as the papers write them."""
  theta = config.theta
  if config.scaling == "dynamic" and length > config.original_length:
    ratio = config.factor * length / config.original_length
    grown = ratio - (config.factor - 1)
    theta *= grown ** (_DIM / (_DIM - 2))
  frequencies = theta ** (-np.arange(0, _DIM, 2) / _DIM)
  return frequencies / (config.factor if config.scaling == "linear" else 1)


class RotationTest(parameterized.TestCase):
  # Those of transformers for the others are recorded, see convert/llama_test.
  @parameterized.product(
    scaling=("none", "linear", "dynamic"), length=(12, 13, 40)
  )
  def test_angles_equal_the_formula(self, scaling, length):
    config = _ROPE[scaling]
    positions = np.stack([np.arange(length), np.arange(length)[::-1]])
    got = jax.jit(lambda p: rotation(p, config, _DIM))(jnp.asarray(positions))
    chex.assert_shape([got.cos, got.sin], (2, length, 8))
    chex.assert_type([got.cos, got.sin], jnp.float32)
    angles = positions[..., None] * _frequencies(config, length)
    np.testing.assert_allclose(got.cos, np.cos(angles), atol=2e-5)
    np.testing.assert_allclose(got.sin, np.sin(angles), atol=2e-5)

  @parameterized.parameters(*ROPE_SCALINGS)
  def test_packed_documents_are_turned_as_alone(self, scaling):
    config, lengths = _ROPE[scaling], (3, 15, 20, 13)
    positions = np.concatenate([np.arange(n) for n in lengths])
    for numbers in ((1, 2, 3, 0), (9, 40, 9, 2)):  # of the documents
      segments = np.repeat(numbers, lengths)
      rows = jnp.stack([positions, positions * 0]), jnp.stack([segments] * 2)
      packed = jax.jit(lambda p, s: rotation(p, config, _DIM, None, s))(*rows)
      alone = [rotation(jnp.arange(n)[None], config, _DIM) for n in lengths]
      expected = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[0], *alone)
      first = jax.tree.map(lambda x: x[0], packed)
      chex.assert_trees_all_close(first, expected, atol=1e-6)
