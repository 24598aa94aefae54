"""The form for cuDNN, run through XLA's version of the same function."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.attention import attention
from moh_jax.ops.cudnn import cudnn_attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.visible import Visible
from tests.ops import devices

_B, _N, _H, _D = 2, 9, 4, 8
# Padding in front, between and behind; and a sequence without a visible key.
_KEY_MASK = jnp.array([[0, 1, 1, 0, 0, 1, 1, 1, 0], [0] * _N], bool)


def _inputs(kv_heads=_H, keys=_N, dtype=jnp.float32):
  r = jax.random.split(jax.random.key(0), 5)
  q = jax.random.normal(r[0], (_B, _N, _H, _D), dtype)
  k, v = (
    jax.random.normal(key, (_B, keys, kv_heads, _D), dtype) for key in r[1:3]
  )
  mask = jax.random.bernoulli(r[3], 0.5, (_B, _N, _H))
  mask = mask.at[:, :, 2].set(False)  # a head that nobody chose
  return (q, k, v), jax.random.normal(r[4], q.shape), mask


class CudnnTest(parameterized.TestCase):
  @parameterized.product(
    kv_heads=(2, 4),
    key_mask=(False, True),
    segments=(False, True),
    causal=(False, True),
    bias=(False, True),
    packed=(False, True),
  )
  def test_equals_the_dense_form(
    self, kv_heads, key_mask, segments, causal, bias, packed
  ):
    arrays, weights, mask = _inputs(kv_heads)
    visible = Visible(
      key_mask=_KEY_MASK if key_mask else None,
      segments=jnp.arange(_N)[None].repeat(_B, 0) // 4 if segments else None,
      causal=causal,
    )
    bias = (
      jax.random.normal(jax.random.key(9), (1, _H, _N, _N)) if bias else None
    )
    active = ActiveHeads(mask, _H) if packed else None
    if packed:
      weights = weights * mask[..., None]

    def loss(attend, *arrays):
      return (attend(*arrays) * weights).sum()

    ours = functools.partial(
      cudnn_attention,
      bias=bias,
      visible=visible,
      active=active,
      scale=0.3,
      backend="xla",
    )
    dense = functools.partial(
      dense_attention, bias=bias, visible=visible, scale=0.3
    )
    got, want = (
      jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))(
        *arrays
      )
      for f in (ours, dense)
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1], want[1]):
      np.testing.assert_allclose(a, b, atol=1e-5)

  @parameterized.product(
    bias=((1, _H, _N, _N), (_B, 1, 1, _N), (1, 1, _N, 1), None),
    key_mask=(False, True),
    causal=(False, True),
  )
  def test_its_arrays_have_its_lengths_and_dtype(self, bias, key_mask, causal):
    arrays, _, _ = _inputs(dtype=jnp.bfloat16)
    bias = None if bias is None else jnp.ones(bias)
    visible = Visible(_KEY_MASK if key_mask else None, None, causal)
    attend = jax.nn.dot_product_attention
    with mock.patch.object(jax.nn, attend.__name__, wraps=attend) as spy:
      cudnn_attention(*arrays, bias, visible, None, 0.3, backend="xla")
    bias, mask = (spy.call_args.kwargs.get(x) for x in ("bias", "mask"))
    for x in filter(lambda x: x is not None, (bias, mask)):
      self.assertEqual(x.shape[2:], (_N, _N))
    if bias is not None:
      self.assertEqual(bias.dtype, jnp.bfloat16)

  def test_fewer_causal_queries_are_the_last_ones(self):
    arrays, _, _ = _inputs(keys=13)
    visible = Visible(causal=True)
    out = cudnn_attention(*arrays, None, visible, None, 0.3, backend="xla")
    expected = dense_attention(*arrays, None, visible, 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  @parameterized.parameters("cpu", "tpu")
  def test_other_devices_are_named(self, platform):
    with (
      devices.traced_for(platform),
      self.assertRaisesRegex(ValueError, f"an NVIDIA GPU, .* {platform}"),
    ):
      attention(*_inputs()[0], implementation="cudnn")

  @absltest.skipIf(jax.default_backend() != "gpu", "needs a GPU")
  def test_on_this_gpu_equals_the_dense_form(self):
    arrays, _, mask = _inputs(dtype=jnp.bfloat16)
    active = ActiveHeads(mask, _H)
    out = attention(*arrays, active=active, implementation="cudnn")
    expected = dense_attention(*arrays, None, Visible(), _D**-0.5)
    expected = jnp.where(mask[..., None], expected, 0)
    np.testing.assert_allclose(
      out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2
    )


if __name__ == "__main__":
  absltest.main()
