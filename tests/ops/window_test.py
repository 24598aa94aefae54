"""Sliding windows against loops, autodiff of a gather, and XLA's conv."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops import window as window_ops

_WINDOWS = (1, 3, 5)
# Square, oblong, one line, and smaller than the windows.
_GRIDS = ((4, 4), (3, 7), (6, 1), (1, 1), (2, 2))
_B, _H, _D = 2, 3, 4
_CASES = tuple(
  {"grid": grid, "window": window} for grid in _GRIDS for window in _WINDOWS
)
# Compiled once per shape: eager views would compile one by one.
_LOGITS = jax.jit(window_ops.window_logits, static_argnums=2)
_MIX = jax.jit(window_ops.window_mix, static_argnums=2)
_CONV = jax.jit(window_ops.depthwise_conv)


def _random(index, *shape, dtype=np.float32):
  """From NumPy: jax.random compiles once for every shape."""
  return np.random.default_rng(index).normal(size=shape).astype(dtype)


def _tokens(index, grid, dtype=np.float32):
  return _random(index, _B, *grid, _H, _D, dtype=dtype)


def _weights(index, grid, window, dtype=np.float32):
  return _random(index, _B, *grid, _H, window**2, dtype=dtype)


def _neighbours(grid, window):
  """Yields (i, j, offset, row, column) of every position inside the grid."""
  reach = window // 2
  for i, j, di, dj in np.ndindex(*grid, window, window):
    row, column = i + di - reach, j + dj - reach
    if 0 <= row < grid[0] and 0 <= column < grid[1]:
      yield i, j, di * window + dj, row, column


def _unfold(x, window):
  """The nine-fold copy: [B, X, Y, ...] to [B, X, Y, L, ...] by gathers."""
  rows, columns = x.shape[1:3]
  offsets = np.arange(window) - window // 2

  def take(x, axis, size):
    index = np.arange(size)[:, None] + offsets
    inside = (index >= 0) & (index < size)
    x = jnp.take(x, index.clip(0, size - 1), axis=axis)
    shape = [1] * x.ndim
    shape[axis : axis + 2] = inside.shape
    return x * inside.reshape(shape)

  x = take(take(x, 1, rows), 3, columns)  # [B, X, w, Y, w, ...]
  x = jnp.moveaxis(x, 2, 3)
  return x.reshape(*x.shape[:3], window * window, *x.shape[5:])


def _naive_logits(q, k, window):
  return jnp.einsum("bxyhd,bxylhd->bxyhl", q, _unfold(k, window))


def _naive_mix(weights, v, window):
  return jnp.einsum("bxyhl,bxylhd->bxyhd", weights, _unfold(v, window))


def _naive_conv(x, kernel):
  taps = kernel.reshape(-1, kernel.shape[-1])
  return jnp.einsum("bxylc,lc->bxyc", _unfold(x, kernel.shape[0]), taps)


def _vjp(function, *args):
  """Output and gradients for a fixed random cotangent, jitted."""

  @jax.jit
  def run(args):
    out, pullback = jax.vjp(function, *args)
    return out, pullback(_random(9, *out.shape, dtype=out.dtype))

  return run(args)


class InsideTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_marks_the_positions_inside_the_grid(self, grid, window):
    expected = np.zeros((*grid, window**2), bool)
    for i, j, offset, _, _ in _neighbours(grid, window):
      expected[i, j, offset] = True
    expected = expected.reshape(-1, window**2)
    np.testing.assert_array_equal(
      window_ops.window_inside(grid, window), expected
    )
    np.testing.assert_array_equal(
      window_ops.window_counts(grid, window), expected.sum(-1)
    )

  @parameterized.parameters(0, 2, -1)
  def test_rejects_windows_that_are_not_odd(self, window):
    with self.assertRaisesRegex(ValueError, f"window={window} "):
      window_ops.window_inside((3, 3), window)


class WindowLogitsTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_equals_a_loop(self, grid, window):
    q, k = _tokens(0, grid), _tokens(1, grid)
    logits = _LOGITS(q, k, window)
    expected = np.zeros((_B, *grid, _H, window**2))
    for i, j, offset, row, column in _neighbours(grid, window):
      pair = q[:, i, j] * k[:, row, column]
      expected[:, i, j, :, offset] = pair.sum(-1)
    chex.assert_type(logits, jnp.float32)
    np.testing.assert_allclose(logits, expected, atol=2e-6)

  @parameterized.product(grid=((3, 5), (2, 2)), window=_WINDOWS)
  def test_gradients_equal_autodiff_of_the_gather(self, grid, window):
    args = _tokens(0, grid), _tokens(1, grid)
    ours = _vjp(lambda q, k: window_ops.window_logits(q, k, window), *args)
    naive = _vjp(lambda q, k: _naive_logits(q, k, window), *args)
    chex.assert_trees_all_close(ours, naive, atol=5e-6)

  @parameterized.parameters(
    (jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16)
  )
  def test_accumulates_low_precision_in_float32(self, q_dtype, k_dtype):
    grid = (3, 4)
    q, k = _tokens(0, grid, q_dtype), _tokens(1, grid, k_dtype)
    logits, (dq, dk) = _vjp(
      lambda q, k: window_ops.window_logits(q, k, 3), q, k
    )
    exact = [x.astype(jnp.float32) for x in (q, k)]
    chex.assert_type(logits, jnp.float32)
    np.testing.assert_allclose(logits, _naive_logits(*exact, 3), atol=1e-5)
    chex.assert_type([dq, dk], [q_dtype, k_dtype])

  def test_rejects_queries_and_keys_of_different_shape(self):
    with self.assertRaises(AssertionError):
      window_ops.window_logits(_tokens(0, (3, 3)), _tokens(1, (3, 4)), 3)


class WindowMixTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_equals_a_loop(self, grid, window):
    weights, v = _weights(0, grid, window), _tokens(1, grid)
    out = _MIX(weights, v, window)
    expected = np.zeros((_B, *grid, _H, _D))
    for i, j, offset, row, column in _neighbours(grid, window):
      weight = weights[:, i, j, :, offset, None]
      expected[:, i, j] += weight * v[:, row, column]
    chex.assert_shape(out, v.shape)
    np.testing.assert_allclose(out, expected, atol=5e-6)

  @parameterized.product(grid=((3, 5), (2, 2)), window=_WINDOWS)
  def test_gradients_equal_autodiff_of_the_gather(self, grid, window):
    args = _weights(0, grid, window), _tokens(1, grid)
    ours = _vjp(lambda w, v: window_ops.window_mix(w, v, window), *args)
    naive = _vjp(lambda w, v: _naive_mix(w, v, window), *args)
    chex.assert_trees_all_close(ours, naive, atol=5e-6)

  @parameterized.parameters(
    (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    (jnp.float32, jnp.bfloat16, jnp.float32),
    (jnp.bfloat16, jnp.float32, jnp.float32),
  )
  def test_output_has_the_wider_dtype(self, weights_dtype, v_dtype, expected):
    weights = _weights(0, (3, 4), 3, weights_dtype)
    v = _tokens(1, (3, 4), v_dtype)
    out, grads = _vjp(lambda w, v: window_ops.window_mix(w, v, 3), weights, v)
    chex.assert_type(out, expected)
    chex.assert_type(grads, [weights_dtype, v_dtype])
    exact = (x.astype(jnp.float32) for x in (weights, v))
    np.testing.assert_allclose(
      np.asarray(out, np.float32), _naive_mix(*exact, 3), atol=0.15
    )


class MemoryTest(parameterized.TestCase):
  """Keys and values are never unfolded into nine copies.

  Bounds are in copies of the values: the padded operands of each function, with
  one more as slack. The weights are 9 / 32 of a copy.
  """

  _TOKENS = (2, 28, 28, 4, 32)
  _WEIGHTS = (*_TOKENS[:-1], 9)

  def _temporary(self, function, *shapes) -> float:
    """Temporary memory of the compiled function over the bytes of v."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*args).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return temporary / (4 * np.prod(self._TOKENS))

  def _gradients(self, function):
    return jax.grad(
      lambda a, b: jnp.sum(function(a, b, 3) ** 2), argnums=(0, 1)
    )

  def test_mix_pads_the_values_only(self):
    mix = functools.partial(window_ops.window_mix, window=3)
    self.assertLess(self._temporary(mix, self._WEIGHTS, self._TOKENS), 2.0)

  def test_logits_pad_the_keys_only(self):
    logits = functools.partial(window_ops.window_logits, window=3)
    # The padded copy (1.15), one view (1), the transposed result (0.28).
    self.assertLess(self._temporary(logits, self._TOKENS, self._TOKENS), 2.5)

  def test_gradients_of_mix_unfold_nothing(self):
    grads = self._gradients(window_ops.window_mix)
    self.assertLess(self._temporary(grads, self._WEIGHTS, self._TOKENS), 5.0)

  def test_gradients_of_logits_unfold_nothing(self):
    grads = self._gradients(window_ops.window_logits)
    self.assertLess(self._temporary(grads, self._TOKENS, self._TOKENS), 5.0)

  def test_unfolded_form_exceeds_the_bounds(self):
    mix = functools.partial(_naive_mix, window=3)
    self.assertGreater(self._temporary(mix, self._WEIGHTS, self._TOKENS), 8.0)


class DepthwiseConvTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_equals_xla_grouped_convolution(self, grid, window):
    x, kernel = _random(0, _B, *grid, 6), _random(1, window, window, 6)
    expected = jax.lax.conv_general_dilated(
      x,
      kernel[:, :, None],
      (1, 1),
      [(window // 2, window // 2)] * 2,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=6,
    )
    out = _CONV(x, kernel)
    chex.assert_shape(out, x.shape)
    np.testing.assert_allclose(out, expected, atol=5e-6)

  @parameterized.product(grid=((3, 5), (2, 2)), window=_WINDOWS)
  def test_gradients_equal_autodiff_of_the_gather(self, grid, window):
    args = _random(0, _B, *grid, 6), _random(1, window, window, 6)
    chex.assert_trees_all_close(
      _vjp(window_ops.depthwise_conv, *args),
      _vjp(_naive_conv, *args),
      atol=1e-5,
    )

  @parameterized.product(grid=_GRIDS, window=_WINDOWS)
  def test_both_forms_of_the_taps_gradient_agree(self, grid, window):
    x, grad = _random(0, _B, *grid, 6), _random(1, _B, *grid, 6)
    forms = (window_ops._taps_grad, window_ops._taps_grad_by_row)
    whole, by_row = (
      jax.jit(functools.partial(form, window=window))(x, grad) for form in forms
    )
    expected = np.zeros((window**2, 6))
    for i, j, offset, row, column in _neighbours(grid, window):
      expected[offset] += (x[:, row, column] * grad[:, i, j]).sum(0)
    chex.assert_shape([whole, by_row], (window**2, 6))
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(by_row, expected, atol=1e-5)

  @parameterized.parameters("_taps_grad", "_taps_grad_by_row")
  def test_taps_gradient_of_bfloat16_sums_in_float32(self, form):
    # A bfloat16 sum of 1,024 ones would stop at 256.
    x = jnp.ones((4, 16, 16, 1), jnp.bfloat16)
    taps = getattr(window_ops, form)(x, x, window=1)
    chex.assert_type(taps, jnp.float32)
    np.testing.assert_array_equal(taps, [[1024.0]])

  @parameterized.parameters(jnp.float32, jnp.bfloat16)
  def test_bfloat16_input_keeps_its_dtype(self, kernel_dtype):
    x = _random(0, _B, 3, 4, 6, dtype=jnp.bfloat16)
    kernel = _random(1, 3, 3, 6, dtype=kernel_dtype)
    out, grads = _vjp(window_ops.depthwise_conv, x, kernel)
    chex.assert_type(out, jnp.bfloat16)
    chex.assert_type(grads, [jnp.bfloat16, kernel_dtype])
    expected = _naive_conv(x.astype(jnp.float32), kernel.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.1)

  def test_rejects_a_batchless_map(self):
    with self.assertRaises(AssertionError):
      window_ops.depthwise_conv(jnp.ones((3, 4, 6)), jnp.ones((3, 3, 6)))


def _with_gradients(function):
  """Value and gradients of a scalar of the function."""
  return jax.value_and_grad(
    lambda *args: jnp.sum(jnp.sin(function(*args))), argnums=(0, 1)
  )


class TransformsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    grid = (3, 4)
    self.cases = {
      "logits": (
        functools.partial(window_ops.window_logits, window=3),
        (_tokens(0, grid), _tokens(1, grid)),
      ),
      "mix": (
        functools.partial(window_ops.window_mix, window=3),
        (_weights(0, grid, 3), _tokens(1, grid)),
      ),
      "conv": (
        window_ops.depthwise_conv,
        (_random(0, _B, *grid, 6), _random(1, 3, 3, 6)),
      ),
    }

  @parameterized.parameters("logits", "mix", "conv")
  def test_jit_equals_eager(self, name):
    function, args = self.cases[name]
    call = _with_gradients(function)
    chex.assert_trees_all_close(
      jax.jit(call)(*args), call(*args), rtol=1e-5, atol=1e-5
    )

  @parameterized.parameters("logits", "mix", "conv")
  def test_vmap_equals_a_loop(self, name):
    function, args = self.cases[name]
    call = jax.jit(_with_gradients(function))
    several = [jax.tree.map(lambda x, s=s: x * s, args) for s in (1.0, -0.5)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *several)
    loop = [call(*args) for args in several]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *loop)
    mapped = jax.jit(jax.vmap(_with_gradients(function)))(*stacked)
    chex.assert_trees_all_close(mapped, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters("logits", "mix", "conv")
  def test_rematerialized_gradients_equal_the_plain_ones(self, name):
    function, args = self.cases[name]
    call = jax.jit(_with_gradients(function))
    remat = jax.jit(_with_gradients(jax.checkpoint(function)))
    chex.assert_trees_all_close(remat(*args), call(*args), rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
  absltest.main()
