"""How many programs stand around the Triton kernels, compiled for GPUs."""

import math

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.attention_forms import Call, Visible
from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels.attention import block_sizes, kernel_attention
from tests.compiles.compiling import compile_for, programs

pytestmark = pytest.mark.compiles

_B, _N, _H, _D = 1, 4096, 32, 64
_Q = jax.ShapeDtypeStruct((_B, _N, _H, _D), jnp.bfloat16)
_GATES = jax.ShapeDtypeStruct((_B, _N, _H), jnp.float32)
_KERNEL = "__gpu$xla.gpu.triton"


def _attend(q, k, v, gates):
  """Gated causal attention; half of the heads are active."""
  rows = block_sizes("triton", _D, q.dtype).rows
  blocks = head_blocks(ActiveHeads(gates != 0, _H // 2), rows)
  visible, scale = Visible(causal=True), _D**-0.5
  out = kernel_attention(
    Call(q, k, v, visible, scale), blocks, backend="triton"
  )
  return out * gates[..., None].astype(out.dtype)


def _with_gradients(q, k, v, gates, grad):
  out, pull = jax.vjp(_attend, q, k, v, gates)
  return out, pull(grad)


def _large(programs):
  """Programs without a kernel that write as much as the active queries."""
  return [
    line
    for line, shapes in programs
    if _KERNEL not in line
    and max(map(math.prod, shapes), default=0) >= _B * _N * _H // 2 * _D
  ]


class GlueTest(parameterized.TestCase):
  @parameterized.parameters(("h100", 9), ("a100", 10), ("rtx4090", 9))
  def test_few_programs_around_the_forward_kernel(self, target, most):
    found = programs(compile_for(target, _attend, _Q, _Q, _Q, _GATES))
    kernels = [line for line, _ in found if _KERNEL in line]
    self.assertLen(kernels, 1)
    self.assertLessEqual(len(found) - 1, most)
    # Queries, keys and values are read in place; the gate multiplies where rows
    # return to their tokens.
    self.assertLen(_large(found), 1)

  @parameterized.parameters(("h100", 14), ("a100", 17), ("rtx4090", 14))
  def test_few_programs_around_all_kernels(self, target, most):
    arrays = _Q, _Q, _Q, _GATES, _Q
    found = programs(compile_for(target, _with_gradients, *arrays))
    kernels = [line for line, _ in found if _KERNEL in line]
    self.assertLen(kernels, 3)
    self.assertLessEqual(len(found) - 3, most)
    # One makes the rows of queries and gradients, one takes rows back; the
    # gates and their gradients need no pass of their own.
    self.assertLen(_large(found), 2)


if __name__ == "__main__":
  absltest.main()
