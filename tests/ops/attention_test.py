"""Attention: every form against float64, and what all calls have in common."""

import itertools
import re
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attend, attention
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.packed import packed_attention
from moh_jax.ops.pairs import ActiveHeads, head_blocks
from moh_jax.ops.stock import cudnn_attention
from tests.ops import cases
from tests.ops.cases import BIASED, CASES, Case

_PLAIN = ("dense", "blocked", "packed", "cudnn")
# Causal steps of these lengths read the keys up to their last token.
_LONG = {
  "long": Case(queries=150, keys=150, kv_heads=1, head_dim=8, causal=True),
  "long_masks": Case(
    queries=150, keys=150, head_dim=8, causal=True, segments=True, key_mask=True
  ),
  "long_texts": Case(queries=70, keys=200, head_dim=8, causal=True),
  "first_queries": Case(queries=140, keys=130, head_dim=8, causal=True),
}
_TABLE = {**CASES, **BIASED, **_LONG}
# Other cases have what these have, and more.
_LESS = {"whole_blocks", "bidirectional", "causal", "key_mask", "segments"}
_SPLASH = {
  "plain": {},
  "masks": {"causal": True, "key_mask": True, "segments": True},
  "grouped": {"queries": 128, "kv_heads": 1, "causal": True, "key_mask": True},
  "two_in_lanes": {"head_dim": 64, "causal": True, "dtype": "bfloat16"},
  "four_in_lanes": {"head_dim": 32, "causal": True, "key_mask": True},
  "groups_of_two": {"kv_heads": 2, "head_dim": 64},
}


class FormsTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(sorted(_TABLE.keys() - _LESS), ("packed",)),
    *itertools.product(
      ("all_masks", "first_queries", "one_token", "hiding_bias"),
      ("dense", "blocked", "cudnn"),
    ),
    *itertools.product(("key_mask", "hiding_bias_of_all"), ("dense", "cudnn")),
  )  # fmt: skip
  def test_value_and_gradients_equal_float64(self, name, form):
    case = _TABLE[name]
    got = cases.results(form, case, case.arrays(), case.blocks(8))
    cases.check(got, cases.reference(case))

  @parameterized.parameters(*_SPLASH)
  @pytest.mark.integration
  def test_splash_equals_float64(self, name):
    case = Case(**{"queries": 256, "keys": 256, **_SPLASH[name]})
    got = cases.results("splash", case, case.arrays(), None)
    chex.assert_type(got, case.dtype)
    exact = case.dtype == "float32"
    cases.check(got, cases.reference(case), *(() if exact else (2e-2, 2e-2)))

  @parameterized.parameters("dense", "packed")
  def test_gradients_have_the_dtype_of_their_arrays(self, form):
    case = CASES["fewer_queries"]
    q, k, v, *_ = case.arrays()
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    loss = lambda *arrays: _call(case, form, arrays).sum()  # noqa: E731
    grads = jax.grad(loss, (0, 1, 2))(q, k, v)
    chex.assert_trees_all_equal_dtypes(grads, (q, k, v))

  @parameterized.parameters(*_PLAIN)
  def test_16_bits_are_close_and_keep_their_dtype(self, form):
    case = CASES["fewer_queries"]
    arrays = case.arrays(jnp.bfloat16)
    got = cases.results(form, case, arrays, case.blocks(8))
    chex.assert_type(got, jnp.bfloat16)
    cases.check(got, cases.reference(case, arrays), 2e-2, 3e-2)

  def test_memory_of_blocks_is_linear_in_the_sequence(self):
    def temporary(tokens: int) -> int:
      q = jax.ShapeDtypeStruct((1, tokens, 4, 16), jnp.float32)
      mask = jax.ShapeDtypeStruct((1, tokens, 4), bool)

      def forward(q, k, v, mask):
        blocks = head_blocks(ActiveHeads(mask, 2), 16)
        return packed_attention(Call(q, k, v, Visible(), 1.0), blocks, 4)

      compiled = jax.jit(forward).lower(q, q, q, mask).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    self.assertLess(temporary(2048), 2.2 * temporary(1024))


def _call(case: Case, implementation="auto", arrays=None, **changes):
  """Attention of a case, which expects half of the heads to be active."""
  *own, _ = case.arrays()[:4]
  bias = case.arrays()[4:]
  mask = jnp.asarray(case.active())
  active = ActiveHeads(mask, case.heads, case.heads / 2)
  options = {"bias": bias[0] if bias else None, "active": active} | changes
  call = Call(*(arrays or own), case.visible(), case.factor(), **options)
  return attend(call, implementation)


class AttentionTest(parameterized.TestCase):
  @parameterized.parameters(
    ("all_masks", "auto"), ("every_head", "packed"), ("all_masks", "kernel"),
    ("hiding_bias", "packed"),
  )  # fmt: skip
  def test_active_heads_equal_float64(self, name, implementation):
    case = _TABLE[name]
    out = jnp.where(case.active()[..., None], _call(case, implementation), 0)
    cases.check([out], cases.reference(case)[:1])

  @parameterized.parameters(
    ((2, 4, 5, 7),), ((4, 5, 7),), ((2, 1, 1, 7),), ((1, 4, 5, 1),)
  )
  def test_bias_broadcasts_to_every_pair(self, shape):
    case = Case(queries=5, keys=7, bias=(2, 4), share=1.0, kv_heads=2)
    bias = jax.random.normal(jax.random.key(1), shape)
    out = _call(case, bias=bias)
    whole = jnp.broadcast_to(bias, (2, 4, 5, 7))
    arrays = [*case.arrays()[:4], whole]
    cases.check([out], cases.reference(case, arrays)[:1])

  @parameterized.product(form=("packed", "kernel"), kv_heads=(4, 2))
  @pytest.mark.integration
  def test_a_token_with_more_heads_than_its_bound_gives_nan(
    self, form, kv_heads
  ):
    case = Case(queries=96, keys=96, kv_heads=kv_heads, share=1.0)
    q, k, v, _ = case.arrays()
    few = np.arange(4) == np.arange(96)[:, None] % 4
    active = jnp.asarray([np.ones((96, 4), bool), few])

    def run(q, k, v):
      out = attention(q, k, v, active=active, max_active=1, implementation=form)
      return (jnp.sin(out) * active[..., None]).sum(), out

    grads, out = jax.grad(run, (0, 1, 2), has_aux=True)(q, k, v)
    for x in (out, *grads):
      self.assertTrue(np.isnan(x[0]).any())
      self.assertTrue(np.isfinite(x[1]).all())
    expected = cases.reference(case)[0]
    np.testing.assert_allclose(out[1][few], expected[1][few], atol=2e-6)

  @parameterized.parameters(("packed", "float32"), ("kernel", "bfloat16"))
  @pytest.mark.integration
  def test_jax_enable_x64_changes_nothing(self, form, dtype):
    def run():
      case = Case(causal=True, segments=True, kv_heads=2, dtype=dtype)

      def loss(*arrays):
        out = _call(case, form, arrays)
        return (out.astype(jnp.float32) * case.active()[..., None]).sum()

      return jax.value_and_grad(loss, (0, 1, 2))(*case.arrays()[:3])

    want = run()
    with jax.enable_x64(True):
      got = run()
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_close(got, want, atol=1e-6)

  @parameterized.parameters(
    ({"implementation": "flush"}, "implementation='flush' .*'auto', 'den"),
    ({"scale": 0.0}, "scale=0.0 must be above 0"),
    ({"k": (2, 7, 3, 8), "v": (2, 7, 3, 8)}, "4 query heads .* 3 key/value"),
    ({"v": np.ones((2, 7, 4, 8), int)}, "v int.* must be floating"),
    ({"bias": np.ones((7, 7), bool)}, "bias bool.* must be floating"),
    ({"v": (2, 4, 4, 8)}, r"v float32\(2, 4.* must be floating\(2, 7"),
    ({"q": (7, 4, 8)}, "q has shape .* must have 4 axes"),
    ({"key_mask": (2, 6)}, r"key_mask float32\(2, 6\) must be bool\(2, 7\)"),
    ({"segments": (2, 7)}, "segments float32.* must be integer"),
    ({"bias": (1, 1, 1, 2, 7)}, "bias float32.* must be floating"),
    ({"bias": (2, 7)}, r"bias float32\(2, 7\) must be floating\(2, 4,"),
    ({"active": (2, 7, 8)}, r"active float32\(2, 7, 8\) must be bool\(2, 7,"),
  )
  def test_what_does_not_fit_is_named(self, given, message):
    given = dict.fromkeys("qkv", (2, 7, 4, 8)) | given
    given = {
      name: jnp.ones(value) if isinstance(value, tuple) else value
      for name, value in given.items()
    }
    with self.assertRaisesRegex(ValueError, message):
      attention(**given)


class PrecisionTest(absltest.TestCase):
  def test_softmax_of_bfloat16_inputs_is_float32(self):
    # 512 equal keys: bfloat16 weights and sums would be off by far more.
    q, k, v, _ = Case(queries=2, keys=512).arrays(jnp.bfloat16)
    out = attention(q, jnp.zeros_like(k), jnp.ones_like(v))
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, rtol=4e-3)

  def test_bfloat16_products_stay_bfloat16_backward(self):
    def loss(*args):
      return attention(*args).astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    arrays = Case(queries=5).arrays(jnp.bfloat16)[:3]
    text = grad.lower(*arrays).as_text()
    products = re.findall(r"stablehlo.dot_general .* : \((.*)\) ->", text)
    self.assertLen(products, 6)
    for operands in products:
      self.assertEqual(operands.count("xbf16>"), 2)


class CudnnTest(parameterized.TestCase):
  @parameterized.parameters(
    ((1, 4, 9, 9), False, True), ((2, 1, 1, 9), True, False), (None, True, True)
  )
  def test_its_arrays_have_its_lengths_and_dtype(self, bias, key_mask, causal):
    case = Case(queries=9, keys=9, key_mask=key_mask, causal=causal)
    bias = None if bias is None else jnp.ones(bias)
    attend = jax.nn.dot_product_attention
    with mock.patch.object(jax.nn, attend.__name__, wraps=attend) as spy:
      arrays = case.arrays(jnp.bfloat16)[:3]
      call = Call(*arrays, case.visible(), 0.3, bias)
      cudnn_attention(call, "xla")
    bias, mask = (spy.call_args.kwargs.get(x) for x in ("bias", "mask"))
    for x in filter(lambda x: x is not None, (bias, mask)):
      self.assertEqual(x.shape[2:], (9, 9))
    if bias is not None:
      self.assertEqual(bias.dtype, jnp.bfloat16)
