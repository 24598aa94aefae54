"""Attention through cuDNN, compiled for GPUs: its calls, copies and memory."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers.moh import MoHAttention
from moh_jax.ops.attention import attention
from tests.compiles.programs import compile_for, programs

pytestmark = pytest.mark.compiles

_B, _N, _H, _D = 2, 1024, 16, 64
_CALL = re.compile(r'custom_call_target="__cudnn\$(\w+)"')


def _shape(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def _gradients(q, k, v, key_mask, grad):
  def attend(q, k, v):
    return attention(q, k, v, key_mask=key_mask, implementation="cudnn")

  out, pull = jax.vjp(attend, q, k, v)
  return out, pull(grad)


class CudnnTest(parameterized.TestCase):
  @parameterized.product(
    target=("h100", "a100"),
    kv_heads=(_H, 4),
    key_mask=(False, True),
  )
  def test_reads_keys_and_values_once(self, target, kv_heads, key_mask):
    q, k = _shape(_B, _N, _H, _D), _shape(_B, _N, kv_heads, _D)
    key_mask = _shape(_B, _N, dtype=bool) if key_mask else None
    compiled = compile_for(target, _gradients, q, k, k, key_mask, q)
    found = programs(compiled)
    # No mask is written out: it would have the size of the logits.
    self.assertEqual(
      _CALL.findall(compiled.as_text()), ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    )
    # The only scatter is that of the table's numbers.
    for line in re.findall(r".* scatter\(.*", compiled.as_text()):
      self.assertIn(" = s32[", line)
    # Queries, gradient, output and gradient of the queries, at most; keys,
    # values and their gradients. cuDNN adds the queries' gradients up in
    # float32 where it has to.
    rows, ours, theirs = _N * _D, _B * _H * 2, _B * kv_heads * 2
    largest = rows * (4 * ours + 2 * ours + 4 * theirs) + (1 << 20)
    memory = compiled.memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, largest)
    sizes = [shape for _, shapes in found for shape in shapes]
    for shape in sizes:
      self.assertLessEqual(shape[-2:].count(_N), 1, shape)

  @parameterized.parameters("h100", "a100")
  def test_a_layer_arranges_its_arrays_in_one_pass(self, target):
    layer = MoHAttention(
      HeadBudget(_H, 2, 6, _D), implementation="cudnn", dtype=jnp.bfloat16
    )
    x = _shape(_B, _N, _H * _D)
    init = layer.clone(implementation="dense").init
    params = nn.unbox(jax.eval_shape(init, jax.random.key(0), x))
    compiled = compile_for(target, lambda p, x: layer.apply(p, x)[0], params, x)
    large = [
      line
      for line, shapes in programs(compiled)
      if max(map(math.prod, shapes), default=0) >= _B * _N * _H * _D
    ]
    # The projection; queries, keys and values out of it; cuDNN; times the
    # gates; the output projection and its bias.
    self.assertLen(large, 6)
