"""Window and pooled attention under one softmax."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.window import (
  aggregated_attention,
  aggregated_weights,
  l2_normalize,
)

_B, _H, _D, _P = 2, 3, 4, 2
_VALUES = ("v", "pool_v")
# (grid, window): the last grid is smaller than its window.
_CASES = (((3, 4), 3), ((4, 2), 1), ((2, 3), 5))


@functools.cache
def _inputs(grid, window, dtype=jnp.float32):
  tokens, offsets = grid[0] * grid[1], window**2
  shapes = {
    "q": (_B, tokens, _H, _D),
    "k": (_B, tokens, _H, _D),
    "v": (_B, tokens, _H, _D),
    "pool_k": (_B, _P, _H, _D),
    "pool_v": (_B, _P, _H, _D),
    "window_bias": (_H, offsets),
    "pool_bias": (_H, tokens, _P),
    "position_weights": (_B, tokens, _H, offsets),
  }
  rng = np.random.default_rng(0)
  vectors = ("q", "k", "v", "pool_k", "pool_v")
  return {
    name: jnp.asarray(
      rng.normal(size=shape), dtype if name in vectors else jnp.float32
    )
    for name, shape in shapes.items()
  }


def _eager(inputs, grid, window):
  on = {"grid": grid, "window": window}
  others = {name: x for name, x in inputs.items() if name not in _VALUES}
  weights = aggregated_weights(**others, **on)
  return aggregated_attention(weights, *(inputs[n] for n in _VALUES), **on)


_call = jax.jit(_eager, static_argnames=("grid", "window"))


def _reference(inputs, grid, window):
  """One query of one head at a time: concatenate, softmax, sum; float64."""
  x = {name: np.asarray(a, np.float64) for name, a in inputs.items()}
  reach, out = window // 2, np.zeros(x["v"].shape)
  for b, n, h in np.ndindex(_B, grid[0] * grid[1], _H):
    logits, values, extra = [], [], []
    for di, dj in np.ndindex(window, window):
      row, column = n // grid[1] + di - reach, n % grid[1] + dj - reach
      if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        continue
      m, offset = row * grid[1] + column, di * window + dj
      bias = x["window_bias"][h, offset]
      logits.append(x["q"][b, n, h] @ x["k"][b, m, h] + bias)
      values.append(x["v"][b, m, h])
      extra.append(x["position_weights"][b, n, h, offset])
    for p in range(_P):
      bias = x["pool_bias"][h, n, p]
      logits.append(x["q"][b, n, h] @ x["pool_k"][b, p, h] + bias)
      values.append(x["pool_v"][b, p, h])
      extra.append(0.0)
    weights = np.exp(logits - np.max(logits))
    weights = weights / weights.sum() + np.array(extra)
    out[b, n, h] = weights @ np.array(values)
  return out


class AggregatedAttentionTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_equals_one_concatenated_softmax(self, grid, window):
    inputs = _inputs(grid, window)
    out = _call(inputs, grid, window)
    chex.assert_shape(out, inputs["v"].shape)
    expected = _reference(inputs, grid, window)
    np.testing.assert_allclose(out, expected, atol=5e-6)

  @parameterized.parameters(*_CASES)
  def test_softmax_weights_sum_to_one(self, grid, window):
    inputs = dict(_inputs(grid, window))
    for name in ("v", "pool_v"):
      inputs[name] = jnp.ones_like(inputs[name])
    inputs["position_weights"] *= 0
    np.testing.assert_allclose(_call(inputs, grid, window), 1.0, rtol=1e-6)

  def test_position_weights_are_added_after_the_softmax(self):
    grid, window = _CASES[0]
    inputs = _inputs(grid, window)
    twice = inputs | {"position_weights": 2 * inputs["position_weights"]}
    none = inputs | {"position_weights": 0 * inputs["position_weights"]}
    out = _call(inputs, grid, window)
    middle = (_call(none, grid, window) + _call(twice, grid, window)) / 2
    np.testing.assert_allclose(out, middle, atol=5e-6)

  @parameterized.parameters(-200.0, 200.0)
  def test_large_logits_stay_finite(self, shift):
    grid, window = _CASES[0]
    inputs = dict(_inputs(grid, window))
    inputs["pool_bias"] = inputs["pool_bias"] + shift
    out = _call(inputs, grid, window)
    expected = _reference(inputs, grid, window)
    np.testing.assert_allclose(out, expected, atol=2e-5)

  def test_gradients_equal_finite_differences(self):
    grid, window = (2, 3), 3
    jax.test_util.check_grads(
      functools.partial(_call, grid=grid, window=window),
      (_inputs(grid, window),),
      order=1,
      modes=("rev",),
      eps=1e-2,
      rtol=1e-2,
    )

  def test_bfloat16_output_is_close_to_float32(self):
    grid, window = _CASES[0]
    out = _call(_inputs(grid, window, jnp.bfloat16), grid, window)
    chex.assert_type(out, jnp.bfloat16)
    expected = _reference(_inputs(grid, window), grid, window)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.2)

  def test_jit_equals_eager(self):
    grid, window = _CASES[0]
    inputs = _inputs(grid, window)
    np.testing.assert_allclose(
      _call(inputs, grid, window), _eager(inputs, grid, window), atol=2e-6
    )

  @parameterized.parameters("k", "pool_v")
  def test_rejects_unequal_shapes(self, name):
    grid, window = _CASES[0]
    inputs = dict(_inputs(grid, window))
    inputs[name] = inputs[name][:, :-1]
    with self.assertRaises(AssertionError):
      _call(inputs, grid, window)


class L2NormalizeTest(parameterized.TestCase):
  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_gives_float32_unit_vectors(self, dtype):
    x = 100 * jax.random.normal(jax.random.key(0), (2, 5, 3, 4)).astype(dtype)
    unit = l2_normalize(x)
    chex.assert_shape(unit, x.shape)
    chex.assert_type(unit, jnp.float32)
    exact = np.asarray(x, np.float64)
    expected = exact / np.linalg.norm(exact, axis=-1, keepdims=True)
    np.testing.assert_allclose(unit, expected, atol=1e-6)

  def test_zero_vector_stays_zero_with_finite_gradient(self):
    x = jnp.zeros((1, 4))
    np.testing.assert_array_equal(l2_normalize(x), 0.0)
    chex.assert_tree_all_finite(jax.grad(lambda x: l2_normalize(x).sum())(x))


if __name__ == "__main__":
  absltest.main()
