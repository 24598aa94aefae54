"""Per-head attention against a NumPy reference; masks and their gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attention
from moh_jax.ops.blocked import blocked_attention
from moh_jax.ops.cudnn import cudnn_attention
from moh_jax.ops.dense import attend_one_by_one, dense_attention
from moh_jax.ops.head_blocks import ActiveHeads, all_blocks, head_blocks
from moh_jax.ops.visible import Visible

_B, _H, _D = 2, 4, 6


def _inputs(queries=5, keys=5, kv_heads=_H, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = [(queries, _H), (keys, kv_heads), (keys, kv_heads)]
  return [
    jnp.asarray(rng.normal(size=(_B, *shape, _D)), dtype) for shape in shapes
  ]


def _reference(q, k, v, bias=None, key_mask=None, causal=False, scale=None):
  """Attention of one query of one head at a time, float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  queries, keys = q.shape[1], k.shape[1]
  group = q.shape[2] // k.shape[2]
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  bias = np.zeros(()) if bias is None else np.asarray(bias, np.float64)
  bias = np.broadcast_to(bias, (_B, q.shape[2], queries, keys))
  out = np.zeros(q.shape)
  for b, n, h in np.ndindex(*q.shape[:3]):
    seen = [
      m
      for m in range(keys)
      if (key_mask is None or key_mask[b, m])
      and (not causal or m <= n + keys - queries)
    ]
    if not seen:
      continue
    logits = k[b, seen, h // group] @ q[b, n, h] * scale + bias[b, h, n, seen]
    weights = np.exp(logits - logits.max())
    out[b, n, h] = weights / weights.sum() @ v[b, seen, h // group]
  return out


def _key_mask(keys: int) -> np.ndarray:
  return np.arange(keys) < np.array([[keys], [keys - 2]])


class AttentionTest(parameterized.TestCase):
  @parameterized.product(
    kv_heads=(1, 2, 4), masked=(False, True), causal=(False, True)
  )
  def test_equals_numpy_reference(self, kv_heads, masked, causal):
    q, k, v = _inputs(kv_heads=kv_heads)
    options = {"key_mask": _key_mask(5) if masked else None, "causal": causal}
    out = attention(q, k, v, **options)
    chex.assert_shape(out, q.shape)
    expected = _reference(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.product(
    queries=(1, 3, 5), masked=(False, True), implementation=("auto", "dense")
  )
  def test_causal_queries_are_the_last_ones(
    self, queries, masked, implementation
  ):
    q, k, v = _inputs(queries=queries, keys=5, kv_heads=2)
    options = {"key_mask": _key_mask(5) if masked else None, "causal": True}
    out = attention(q, k, v, **options, implementation=implementation)
    expected = _reference(q, k, v, **options)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.product(
    bias=((_B, _H, 5, 5), (1, _H, 5, 5), None), causal=(False, True)
  )
  def test_one_sequence_after_another_equals_all_at_once(self, bias, causal):
    q, k, v = _inputs(kv_heads=2)
    if bias is not None:
      bias = jax.random.normal(jax.random.key(1), bias)
    segments = jnp.array([[1, 1, 1, 2, 2], [1, 2, 2, 2, 0]])
    visible = Visible(jnp.asarray(_key_mask(5)), segments, causal)

    def evaluate(attend):
      def loss(q, k, v, bias):
        return (attend(q, k, v, bias, visible, 0.3) ** 2).mean()

      argnums = (0, 1, 2) if bias is None else (0, 1, 2, 3)
      return jax.value_and_grad(loss, argnums)(q, k, v, bias)

    found, expected = map(evaluate, (attend_one_by_one, dense_attention))
    chex.assert_trees_all_close(found, expected, atol=2e-6)

  def test_first_query_of_too_few_keys_sees_nothing(self):
    q, k, v = _inputs(queries=5, keys=3)
    out = attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :2], 0.0)
    np.testing.assert_allclose(out, _reference(q, k, v, causal=True), atol=2e-6)

  @parameterized.parameters(
    ((_B, _H, 5, 7),), ((_H, 5, 7),), ((_B, 1, 1, 7),), ((1, _H, 5, 1),)
  )
  def test_bias_broadcasts_to_every_pair(self, shape):
    q, k, v = _inputs(keys=7, kv_heads=2)
    bias = jax.random.normal(jax.random.key(1), shape)
    out = attention(q, k, v, bias=bias)
    expected = _reference(q, k, v, bias=bias)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.parameters(0.0, 1.0, 2.5)
  def test_scale_replaces_the_default(self, scale):
    q, k, v = _inputs(kv_heads=2)
    out = attention(q, k, v, scale=scale)
    expected = _reference(q, k, v, scale=scale)
    np.testing.assert_allclose(out, expected, atol=5e-6)

  def test_bias_is_added_after_scaling(self):
    q, k, v = _inputs()
    bias = jax.random.normal(jax.random.key(1), (_B, _H, 5, 5))
    out = attention(q, k, v, bias=bias, scale=0.1)
    expected = _reference(q, k, v, bias=bias, scale=0.1)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  def test_query_head_reads_its_group(self):
    q, k, v = _inputs(kv_heads=2)
    v = v.at[:, :, 0].set(0.0)
    out = attention(q, k, v)
    np.testing.assert_array_equal(out[:, :, :2], 0.0)
    self.assertGreater(float(jnp.abs(out[:, :, 2:]).min()), 0.0)

  @parameterized.product(
    kv_heads=(2, 4), v_dtype=(jnp.float32, jnp.bfloat16), causal=(False, True)
  )
  def test_output_has_the_dtype_of_v(self, kv_heads, v_dtype, causal):
    q, k, v = _inputs(kv_heads=kv_heads, dtype=jnp.bfloat16)
    v = v.astype(v_dtype)
    out = attention(q, k, v, causal=causal, key_mask=jnp.ones((_B, 5), bool))
    chex.assert_shape(out, q.shape)
    chex.assert_type(out, v_dtype)

  def test_softmax_of_bfloat16_inputs_is_float32(self):
    # 512 equal keys: bfloat16 weights and sums would be off by far more.
    q, k, v = _inputs(queries=2, keys=512, dtype=jnp.bfloat16)
    out = attention(q, jnp.zeros_like(k), jnp.ones_like(v))
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=4e-3)

  def test_bfloat16_is_close_to_float32(self):
    inputs = _inputs(kv_heads=2)
    out = attention(*(x.astype(jnp.bfloat16) for x in inputs))
    expected = attention(*inputs)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.03)

  def test_jit_equals_eager(self):
    q, k, v = _inputs(kv_heads=2)
    mask = jnp.asarray(_key_mask(5))

    def call(q, k, v, mask):
      return attention(q, k, v, key_mask=mask, causal=True)

    np.testing.assert_allclose(
      jax.jit(call)(q, k, v, mask), call(q, k, v, mask), atol=1e-6
    )


class ActiveTest(parameterized.TestCase):
  """Heads that no gate weighs may be left out; the active ones are the same."""

  @parameterized.product(
    implementation=("auto", "dense", "packed", "kernel"),
    causal=(False, True),
    every=(False, True),
  )
  def test_implementations_agree_on_active_heads(
    self, implementation, causal, every
  ):
    q, k, v = _inputs(queries=20, keys=20, kv_heads=2)
    on = jax.random.bernoulli(jax.random.key(0), 0.5, q.shape[:3])
    active = None if every else ActiveHeads(on, _H)
    on = jnp.ones_like(on) if every else on
    out = attention(
      q, k, v, causal=causal, active=active, implementation=implementation
    )
    expected = _reference(q, k, v, causal=causal)
    np.testing.assert_allclose(
      jnp.where(on[..., None], out, 0),
      np.where(on[..., None], expected, 0),
      atol=2e-6,
    )

  @parameterized.parameters("packed", "kernel")
  def test_a_token_with_more_heads_than_its_bound_gives_nan(self, form):
    q, k, v = _inputs(queries=96, keys=96)
    few = np.arange(_H) == np.arange(96)[:, None] % _H
    active = ActiveHeads(jnp.asarray([np.ones((96, _H), bool), few]), 1)

    def run(q, k, v):
      out = attention(q, k, v, active=active, implementation=form)
      return (jnp.sin(out) * active.mask[..., None]).sum(), out

    grads, out = jax.grad(run, (0, 1, 2), has_aux=True)(q, k, v)
    for x in (out, *grads):
      self.assertTrue(np.isnan(x[0]).any())
      self.assertTrue(np.isfinite(x[1]).all())
    expected = _reference(q, k, v)
    np.testing.assert_allclose(out[1][few], expected[1][few], atol=2e-6)

  @parameterized.product(
    form=("packed", "kernel"), dtype=("float32", "bfloat16")
  )
  def test_jax_enable_x64_changes_nothing(self, form, dtype):
    segments = np.arange(40)[None].repeat(_B, 0) // 16
    chosen = np.arange(_H) // 2 == np.arange(40)[:, None] % 2

    def run():
      active = ActiveHeads(jnp.asarray(chosen)[None].repeat(_B, 0), 2)

      def loss(*args):
        out = attention(
          *args,
          causal=True,
          segments=jnp.asarray(segments),
          active=active,
          implementation=form,
        )
        return (out.astype(jnp.float32) * chosen[None, ..., None]).sum()

      inputs = _inputs(40, 40, kv_heads=2, dtype=dtype)
      return jax.value_and_grad(loss, (0, 1, 2))(*inputs)

    want = run()
    with jax.enable_x64(True):
      got = run()
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, atol=1e-6)


class MaskingTest(parameterized.TestCase):
  def test_query_without_keys_gives_zero(self):
    q, k, v = _inputs()
    mask = jnp.array([[True] * 5, [False] * 5])
    out = attention(q, k, v, key_mask=mask)
    np.testing.assert_array_equal(out[1], 0.0)
    np.testing.assert_allclose(out[0], _reference(q, k, v)[0], atol=2e-6)

  @parameterized.parameters(False, True)
  def test_query_without_keys_has_finite_gradients(self, causal):
    mask = jnp.array([[True] * 5, [False] * 5])
    bias = jnp.zeros((_H, 5, 5))

    def total(q, k, v, bias):
      out = attention(q, k, v, bias=bias[None], key_mask=mask, causal=causal)
      return jnp.sum(out**2)

    grads = jax.grad(total, argnums=(0, 1, 2, 3))(*_inputs(), bias)
    chex.assert_tree_all_finite(grads)
    for grad in grads[:3]:
      np.testing.assert_array_equal(grad[1], 0.0)
      self.assertGreater(float(jnp.abs(grad[0]).max()), 0.0)

  @parameterized.product(
    form=("dense", "blocked", "packed", "cudnn"),
    causal=(False, True),
    shape=((1, 1), (1, _H), (_B, _H)),
  )
  def test_keys_whose_bias_is_minus_infinity_are_hidden(
    self, form, causal, shape
  ):
    rng = np.random.default_rng(0)
    seen = rng.random((*shape, 5, 5)) < 0.6
    seen[:, :, 3] = False  # a query without a key
    visible = Visible(jnp.asarray(_key_mask(5)), None, causal)
    active = ActiveHeads(jnp.asarray(rng.random((_B, 5, _H)) < 0.5), _H)
    weights = jnp.asarray(rng.normal(size=(_B, 5, _H, _D)), jnp.float32)
    if form == "packed":
      weights = weights * active.mask[..., None]

    def attend(q, k, v, bias):
      if form == "dense":
        return dense_attention(q, k, v, bias, visible, 0.4)
      if form == "cudnn":
        return cudnn_attention(q, k, v, bias, visible, None, 0.4, backend="xla")
      table = all_blocks(_B, 5, _H, 2)
      if form == "packed":
        table = head_blocks(active, 2)
      return blocked_attention(q, k, v, bias, visible, table, 0.4)

    def loss(q, k, v, bias):
      return (attend(q, k, v, bias) * weights).sum()

    def finite(q, k, v, bias):
      out = dense_attention(q, k, v, bias, visible, 0.4)
      some = (visible.mask(5, 5) & seen).any(-1).swapaxes(1, 2)
      return (jnp.where(some[..., None], out, 0) * weights).sum()

    got, want = (
      jax.value_and_grad(f, (0, 1, 2, 3))(*_inputs(), jnp.where(seen, 0.5, low))
      for f, low in ((loss, -jnp.inf), (finite, -1e9))
    )
    chex.assert_trees_all_close(got, want, atol=2e-6, rtol=1e-6)

  def test_a_bias_alone_hides_keys_too(self):
    bias = jnp.full((1, 1, 5, 5), -jnp.inf).at[:, :, 1:].set(0.0)
    inputs, every = _inputs(), all_blocks(_B, 5, _H, 2)
    active = ActiveHeads(jnp.arange(_H)[None, None].repeat(5, 1) < 2, 2)
    active = jax.tree.map(lambda x: x.repeat(_B, 0), active)
    none = Visible()
    for out in (
      attention(*inputs, bias=bias),
      attention(*inputs, bias=bias, active=active, implementation="packed"),
      blocked_attention(*inputs, bias, none, every, 0.4),
      cudnn_attention(*inputs, bias, none, None, 0.4, backend="xla"),
    ):
      np.testing.assert_array_equal(out[:, 0], 0.0)
      self.assertTrue(np.isfinite(out).all())

  def test_masked_keys_do_not_matter(self):
    q, k, v = _inputs()
    mask = jnp.asarray(_key_mask(5))
    other = jnp.where(mask[..., None, None], v, 1e9)
    other_k = jnp.where(mask[..., None, None], k, 1e3)
    chex.assert_trees_all_equal(
      attention(q, k, v, key_mask=mask),
      attention(q, other_k, other, key_mask=mask),
    )

  @parameterized.product(queries=(2, 5), argument=(1, 2))
  def test_causal_output_has_no_gradient_of_later_keys(self, queries, argument):
    q, k, v = _inputs(queries=queries, keys=5)

    def output(*args):  # [N]
      return jnp.sin(attention(*args, causal=True)).sum((0, 2, 3))

    jacobian = jax.jacrev(output, argnums=argument)(q, k, v)
    reach = np.asarray(jnp.abs(jacobian).sum((1, 3, 4)))  # [N, M]
    visible = np.tri(queries, 5, 5 - queries, dtype=bool)
    np.testing.assert_array_equal(reach[~visible], 0.0)
    if argument == 1 and queries == 5:
      # A single visible key has weight one regardless: its gradient is a
      # difference of equal sums, which XLA may add up in different orders.
      visible[0] = False
    self.assertGreater(reach[visible].min(), 0.1)

  def test_gradients_equal_finite_differences(self):
    mask = jnp.asarray(_key_mask(5))

    def call(q, k, v):
      return attention(q, k, v, key_mask=mask, causal=True)

    jax.test_util.check_grads(
      call, _inputs(kv_heads=2), order=1, modes=("rev",), eps=1e-2, rtol=1e-2
    )


class SegmentsTest(parameterized.TestCase):
  """Documents packed into one sequence."""

  _SEGMENTS = np.array([[1, 1, 2, 2, 3], [1, 2, 2, 2, 2]])

  @parameterized.product(causal=(False, True), kv_heads=(2, 4))
  def test_every_segment_is_attended_alone(self, causal, kv_heads):
    inputs = _inputs(kv_heads=kv_heads)
    segments = jnp.asarray(self._SEGMENTS)
    out = attention(*inputs, segments=segments, causal=causal)
    for number in (1, 2, 3):
      inside = self._SEGMENTS == number
      alone = _reference(*inputs, key_mask=inside, causal=causal)
      np.testing.assert_allclose(out[inside], alone[inside], atol=2e-6)

  @parameterized.parameters(0, 1, 2)
  def test_other_segments_get_no_gradient(self, argument):
    segments = jnp.asarray(self._SEGMENTS)

    def output(*args):  # [B, N]
      return jnp.sin(attention(*args, segments=segments)).sum((2, 3))

    jacobian = jax.jit(jax.jacrev(output, argnums=argument))(*_inputs())
    reach = np.abs(jacobian).sum((4, 5))  # [B, N, B, M]
    for row in range(_B):
      same = self._SEGMENTS[row][:, None] == self._SEGMENTS[row]
      np.testing.assert_array_equal(reach[row, :, row][~same], 0.0)
      self.assertGreater(float(reach[row, :, row].max()), 0.0)

  def test_padding_among_segments_is_unseen(self):
    q, k, v = _inputs()
    mask = jnp.asarray(self._SEGMENTS != 2)
    options = {"segments": jnp.asarray(self._SEGMENTS), "key_mask": mask}
    out = attention(q, k, v, **options)
    np.testing.assert_array_equal(out[~mask], 0.0)  # no key is left to see
    expected = attention(q, k, v, segments=options["segments"])
    np.testing.assert_allclose(out[mask], expected[mask], atol=2e-6)


class PrecisionTest(absltest.TestCase):
  def test_bfloat16_products_stay_bfloat16_backward(self):
    q, k, v = (x.astype(jnp.bfloat16) for x in _inputs())

    def loss(*args):
      return attention(*args).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    products = list(_products(jaxpr.jaxpr))
    self.assertLen(products, 6)
    for product in products:
      for operand in product.invars:
        self.assertEqual(operand.aval.dtype, jnp.bfloat16)

  def test_bfloat16_gradients_are_as_good_as_of_float32_softmax(self):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, r = (jax.random.normal(key, (1, 64, 2, 16)) for key in keys)
    v = v + 2  # a mean that the normalization must take out exactly

    def loss(*args):
      return (attention(*args).astype(jnp.float32) * r).sum()

    grad = jax.grad(loss, argnums=(0, 1))
    exact = grad(q, k, v)
    rounded = grad(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    for want, got in zip(exact, rounded):
      error = jnp.linalg.norm(got.astype(jnp.float32) - want)
      self.assertLess(error / jnp.linalg.norm(want), 0.015)


def _products(jaxpr):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn
    for inner in jax.tree.leaves(eqn.params):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from _products(inner)


class ErrorsTest(parameterized.TestCase):
  def test_unknown_implementation_lists_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"implementation='flush' .*'auto', 'dense'"
    ):
      attention(*_inputs(), implementation="flush")

  def test_heads_that_do_not_group(self):
    with self.assertRaisesRegex(ValueError, r"4 query heads .* 3 key/value"):
      attention(*_inputs(kv_heads=3))

  def test_keys_and_values_of_different_shape(self):
    q, k, v = _inputs()
    with self.assertRaises(AssertionError):
      attention(q, k, v[:, :4])


if __name__ == "__main__":
  absltest.main()
