"""What is particular to the Triton kernels."""

import warnings

import jax
import jax.numpy as jnp
from absl.testing import absltest

from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels.attention import kernel_attention
from moh_jax.ops.visible import Visible
from tests.ops import devices


class DeprecationTest(absltest.TestCase):
  def test_lowers_where_warnings_are_errors(self):
    devices.need("triton", lowers=True)
    q = jax.ShapeDtypeStruct((1, 64, 2, 32), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 64, 2), jnp.bool_)

    def loss(q, k, v, mask):
      blocks = head_blocks(ActiveHeads(mask, 1), 16)
      visible = Visible(causal=True)
      out = kernel_attention(q, k, v, visible, blocks, 0.1, backend="triton")
      return out.astype(jnp.float32).sum()

    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    with warnings.catch_warnings(), devices.as_if_on_a_gpu():
      warnings.simplefilter("error", DeprecationWarning)
      traced = grad.trace(q, q, q, mask)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    self.assertEqual(text.count("__gpu$xla.gpu.triton"), 3)


if __name__ == "__main__":
  absltest.main()
