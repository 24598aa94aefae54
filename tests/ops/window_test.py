"""Sliding windows, and attention to a window and a pool, against loops."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.ops import window as window_ops
from tests.ops import devices

# Square, oblong, one line, and smaller than the windows.
_SHAPES = [
  {"grid": grid, "window": window}
  for grid, window in (((3, 7), 3), ((6, 1), 3), ((2, 2), 5))
]
_B, _H, _D = 2, 3, 4


def _random(index, *shape, dtype=np.float32):
  """From NumPy: jax.random compiles once for every shape."""
  return np.random.default_rng(index).normal(size=shape).astype(dtype)


def _neighbours(grid, window):
  """Yields (i, j, offset, row, column) of every position inside the grid."""
  reach = window // 2
  for i, j, di, dj in np.ndindex(*grid, window, window):
    row, column = i + di - reach, j + dj - reach
    if 0 <= row < grid[0] and 0 <= column < grid[1]:
      yield i, j, di * window + dj, row, column


def _looped(name, a, b, window):
  """Each function and the gradients of its operands, position by position."""
  a, b = (np.asarray(x, np.float64) for x in (a, b))
  *lead, _ = a.shape
  shape = {"logits": (*lead, window**2), "mix": b.shape, "conv": a.shape}[name]
  out, da, db = np.zeros(shape), np.zeros(a.shape), np.zeros(b.shape)
  cotangent = _random(9, *shape)
  for i, j, offset, row, column in _neighbours(a.shape[1:3], window):
    at, near = np.s_[:, i, j], np.s_[:, row, column]
    if name == "logits":
      grad = cotangent[at][..., offset, None]
      out[at][..., offset] = (a[at] * b[near]).sum(-1)
      da[at] += grad * b[near]
      db[near] += grad * a[at]
    elif name == "mix":
      weight = a[at][..., offset, None]
      out[at] += weight * b[near]
      da[at][..., offset] = (cotangent[at] * b[near]).sum(-1)
      db[near] += weight * cotangent[at]
    else:
      tap = divmod(offset, window)
      out[at] += a[near] * b[tap]
      da[near] += cotangent[at] * b[tap]
      db[tap] += (a[near] * cotangent[at]).sum(0)
  return out, da, db


def _ours(name, a, b, window):
  if name == "conv":
    return window_ops.depthwise_conv(a, b)
  function = {"logits": window_ops.window_logits, "mix": window_ops.window_mix}
  return function[name](a, b, window)


def _inputs(name, grid, window, dtypes=(np.float32,) * 2):
  tokens, weights = (_B, *grid, _H, _D), (_B, *grid, _H, window**2)
  shapes = {
    "logits": (tokens, tokens),
    "mix": (weights, tokens),
    "conv": ((_B, *grid, 6), (window, window, 6)),
  }[name]
  pairs = enumerate(zip(shapes, dtypes))
  return [_random(i, *shape, dtype=dtype) for i, (shape, dtype) in pairs]


def _vjp(name, a, b, window):
  """Output and gradients for a fixed random cotangent."""
  call = functools.partial(_ours, name, window=window)
  out, pull = jax.vjp(call, a, b)
  return out, *pull(_random(9, *out.shape, dtype=out.dtype))


_jitted = jax.jit(_vjp, static_argnums=(0, 3))


class WindowTest(parameterized.TestCase):
  @parameterized.product(
    _SHAPES, name=("logits", "mix", "conv"), platform=("cpu", "gpu")
  )
  def test_values_and_gradients_equal_loops(self, grid, window, name, platform):
    arrays = _inputs(name, grid, window)
    if platform == "cpu":
      ours = _jitted(name, *arrays, window)
    else:  # other devices have other forms of some
      with devices.traced_for(platform):
        ours = _vjp(name, *arrays, window)
    chex.assert_trees_all_close(ours, _looped(name, *arrays, window), atol=1e-5)

  @parameterized.parameters(
    ("logits", "bfloat16", "bfloat16", "float32", 1e-5),
    ("mix", "float32", "bfloat16", "float32", 0.15),
    ("mix", "bfloat16", "float32", "float32", 0.15),
    ("conv", "bfloat16", "float32", "bfloat16", 0.1),
  )
  def test_dtypes(self, name, first, second, expected, atol):
    dtypes = jnp.dtype(first), jnp.dtype(second)
    arrays = _inputs(name, (3, 4), 3, dtypes)
    out, *grads = _jitted(name, *arrays, 3)
    chex.assert_type([out, *grads], [expected, *dtypes])
    exact, *_ = _looped(name, *arrays, 3)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=atol)

  @parameterized.parameters("cpu", "gpu")
  def test_taps_gradient_of_bfloat16_sums_in_float32(self, platform):
    # A bfloat16 sum of 1,024 ones would stop at 256.
    x = jnp.ones((4, 16, 16, 1), jnp.bfloat16)
    _, pull = jax.vjp(window_ops.depthwise_conv, x, jnp.ones((1, 1, 1)))
    with devices.traced_for(platform):
      np.testing.assert_array_equal(pull(x)[1], 1024)

  # Keys and values are never unfolded into nine copies. Bounds are in copies of
  # the values: the padded operands of each function, with one more as slack.
  # The weights are 9 / 32 of a copy.
  @parameterized.parameters(
    ("mix", False, 2.0), ("logits", False, 2.5), ("mix", True, 5.0),
    ("logits", True, 5.0),
  )  # fmt: skip
  def test_temporary_memory(self, name, grads, most):
    tokens = (2, 28, 28, 4, 32)
    first = tokens if name == "logits" else (*tokens[:-1], 9)
    args = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (first, tokens)]
    call = functools.partial(_ours, name, window=3)
    if grads:
      call = jax.grad(lambda *x, f=call: jnp.sum(f(*x) ** 2), argnums=(0, 1))
    compiled = jax.jit(call).lower(*args).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temporary / (4 * np.prod(tokens)), most)


class AggregatedAttentionTest(parameterized.TestCase):
  # Its numbers are held against the public release in tests/parity.
  @parameterized.parameters(-200.0, 200.0)
  def test_a_number_added_to_all_logits_changes_nothing(self, shift):
    q, k, pool_k = (_random(i, _B, n, _H, _D) for i, n in enumerate((6, 6, 2)))
    call = functools.partial(
      window_ops.aggregated_weights, q, k, pool_k, grid=(2, 3), window=3,
      position_weights=np.zeros((_B, 6, _H, 9)),
    )  # fmt: skip

    def weights(added):
      window_bias, pool_bias = np.zeros((_H, 9)), np.zeros((_H, 6, 2))
      near, pooled, total = call(
        window_bias=window_bias + added, pool_bias=pool_bias + added
      )
      return near, pooled.swapaxes(1, 2) / total[..., None]

    chex.assert_trees_all_close(weights(shift), weights(0), atol=2e-5)

  def test_unit_vectors_are_float32_and_have_gradients_at_zero(self):
    unit = window_ops.l2_normalize(jnp.full((1, 4), 3, jnp.bfloat16))
    chex.assert_type(unit, jnp.float32)
    np.testing.assert_allclose(unit, 0.5, rtol=1e-6)
    grad = jax.grad(lambda x: window_ops.l2_normalize(x).sum())
    chex.assert_tree_all_finite(grad(jnp.zeros((1, 4))))
