"""Attention compiled for GPUs and TPUs that are absent, with its gradients.

Its calls, copies, memory and registers.
"""

import glob
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.config.llm import RotaryConfig
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.ops.attention import HOPPER, TPU
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.kernels.attention import block_sizes, kernel_attention
from moh_jax.ops.pairs import ActiveHeads, head_blocks
from moh_jax.ops.position import rotation
from moh_jax.ops.stock import cudnn_attention, splash_attention
from tests.compiles.programs import compile_for, programs

pytestmark = pytest.mark.compiles

_TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
_TPU_KERNEL = 'custom_call_target="tpu_custom_call"'
_OTHERS = {"cudnn": cudnn_attention, "splash": splash_attention}
_PTXAS = shutil.which("ptxas")
_shape = jax.ShapeDtypeStruct


def _core(
  target, backend, tokens, dim, dtype, masks="", *, batch=1, heads=4,
  kv_heads=4,
):  # fmt: skip
  """Compiles attention of the chosen half of the heads, or others' of all."""
  dtype = jnp.dtype(dtype)
  q = _shape((batch, tokens, heads, dim), dtype)
  k = _shape((batch, tokens, kv_heads, dim), dtype)
  per_head = tokens // 2 if backend == "mosaic_tpu" else None

  def run(q, k, v, grad, key_mask, segments, chosen):
    visible = Visible(
      key_mask if "keys" in masks else None,
      segments if "segments" in masks else None,
      "causal" in masks,
    )

    def attend(q, k, v):
      call = Call(q, k, v, visible, dim**-0.5)
      if backend in _OTHERS:
        return _OTHERS[backend](call)
      kernels = TPU if backend == "mosaic_tpu" else HOPPER
      rows = block_sizes(kernels, dim, dtype, per_head).forward.rows
      active = ActiveHeads(chosen, heads // 2)
      blocks = head_blocks(active, rows, heads // kv_heads)
      return kernel_attention(call, blocks, kernels)

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(grad)

  return compile_for(
    target, run, q, k, k, q, _shape((batch, tokens), bool),
    _shape((batch, tokens), jnp.int32), _shape((batch, tokens, heads), bool),
  )  # fmt: skip


def _layer(target, heads, dim, *, batch=2, tokens=2048, width=1024):
  """Compiles a layer with rotations, half of the heads active."""
  layer = MoHAttention(
    HeadBudget(heads, heads // 4, heads // 4, dim), causal=True, use_bias=False,
    dtype=jnp.bfloat16, implementation="kernel",
  )  # fmt: skip
  positions = jnp.arange(tokens)[None]

  def run(params, x, grad):
    places = Places(rotation=rotation(positions, RotaryConfig(), dim))
    out, pull = jax.vjp(
      lambda *args: layer.apply(*args, places=places)[0], params, x
    )
    return out, *pull(grad)

  few = jnp.zeros((1, 8, width))
  params = nn.unbox(jax.eval_shape(lambda: layer.init(jax.random.key(0), few)))
  x = _shape((batch, tokens, width), jnp.bfloat16)
  return compile_for(target, run, params, x, x)


class TpuTest(parameterized.TestCase):
  @parameterized.product(
    target=_TPUS,
    case=(
      ("mosaic_tpu", 256, 64, "bfloat16", "", {"batch": 4}),
      ("mosaic_tpu", 1024, 72, "float32", "keys segments", {}),
      ("mosaic_tpu", 4096, 64, "bfloat16", "keys segments causal", {}),
      ("mosaic_tpu", 4096, 128, "float32", "causal", {"kv_heads": 2}),
      ("mosaic_tpu", 16384, 64, "float32", "", {}),
      ("mosaic_tpu", 16384, 256, "bfloat16", "keys segments causal", {}),
      ("mosaic_tpu", 16384, 256, "float32", "causal", {}),
      ("splash", 1024, 72, "float32", "", {}),
      ("splash", 4096, 64, "bfloat16", "keys segments causal", {"kv_heads": 2}),
      ("splash", 16384, 256, "float32", "causal", {}),
    ),
  )
  def test_forward_and_gradients_compile(self, target, case):
    *arguments, options = case
    compiled = _core(target, *arguments, **options)
    self.assertEqual(compiled.as_text().count(_TPU_KERNEL), 3)
    logits = options.get("batch", 1) * 4 * case[1] ** 2
    for _, shapes in programs(compiled):
      for shape in shapes:
        self.assertLess(math.prod(shape), logits)

  @parameterized.product(
    target=_TPUS, sizes=((12, 128), (24, 64), (16, 32), (12, 96))
  )
  def test_no_copy_of_queries_or_outputs_around_the_kernels(
    self, target, sizes
  ):
    compiled = _layer(target, *sizes)
    self.assertEqual(compiled.as_text().count(_TPU_KERNEL), 3)
    for line, shapes in programs(compiled):
      copied = any(f" {x}(" in line for x in ("copy", "transpose", "reshape"))
      for shape in shapes if copied else ():
        if 2048 in shape:  # not the kernels
          self.assertLess(math.prod(shape), 2048 * math.prod(sizes), line)


class HopperTest(parameterized.TestCase):
  def _check(self, *arguments, spills: bool = False, **options) -> None:
    """Compiles attention with gradients; checks the text of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
      variables = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
      with mock.patch.dict(os.environ, variables):
        compiled = _core(
          "h100", "mosaic_gpu", *arguments, batch=2, heads=8, **options
        )
      text = compiled.as_text()
      self.assertEqual(text.count('custom_call_target="mosaic_gpu'), 3)
      for kernel in ("forward", "query_gradient", "key_gradients"):
        [path] = glob.glob(f"{folder}/moh_{kernel}_kernel_*.ptx")
        ptx = pathlib.Path(path).read_text()
        self.assertIn("wgmma.mma_async", ptx)
        self.assertNotIn("mma.sync", ptx)
        [passes] = glob.glob(f"{folder}/moh_{kernel}_kernel_*passes.log")
        self.assertNotIn("scf.while", pathlib.Path(passes).read_text())
        if _PTXAS:
          self._check_registers(path, spills)

  def _check_registers(self, path: str, spills: bool) -> None:
    command = [_PTXAS, "-v", "-arch=sm_90a", path, "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True)
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertNotIn("serialized", result.stderr)
    if not spills:
      self.assertIn(" 0 bytes spill stores", result.stderr)

  @parameterized.product(
    dim=(64, 96, 128, 256),
    masks=("", "causal", "segments", "keys segments causal"),
  )
  def test_h100(self, dim, masks):
    self._check(2048, dim, "bfloat16", masks, spills=dim > 128, kv_heads=8)

  @parameterized.parameters(
    (1000, 64, "float16", "causal", 2), (1000, 128, "bfloat16", "causal", 2),
    (1000, 128, "bfloat16", "keys segments causal", 4),
    (40, 64, "bfloat16", "", 8),
  )  # fmt: skip
  def test_odd_lengths_and_groups(self, *options):
    self._check(*options[:-1], kv_heads=options[-1])


_B, _N, _H, _D = 2, 1024, 16, 64
_CALL = re.compile(r'custom_call_target="__cudnn\$(\w+)"')


class CudnnTest(parameterized.TestCase):
  @parameterized.product(
    target=("h100", "a100"), kv_heads=(_H, 4), key_mask=(False, True)
  )
  def test_reads_keys_and_values_once(self, target, kv_heads, key_mask):
    compiled = _core(
      target, "cudnn", _N, _D, "bfloat16", "keys" if key_mask else "",
      batch=_B, heads=_H, kv_heads=kv_heads,
    )  # fmt: skip
    found = programs(compiled)
    name = "fmhaScaleBiasSoftmax" if key_mask else "fmhaSoftmax"
    calls = _CALL.findall(compiled.as_text())
    self.assertEqual(calls, [name, f"{name}Backward"])
    # The only scatter is that of the table's numbers.
    for line in re.findall(r".* scatter\(.*", compiled.as_text()):
      self.assertIn(" = s32[", line)
    # Queries, gradient, output and gradient of the queries, at most; keys,
    # values and their gradients. cuDNN adds the queries' gradients up in
    # float32 where it has to.
    rows, ours, theirs = _N * _D, _B * _H * 2, _B * kv_heads * 2
    largest = rows * (4 * ours + 2 * ours + 4 * theirs) + (1 << 20)
    # The only array of tokens by tokens is the mask, for all heads.
    mask = key_mask * _B * _N * _N
    largest += 2 * mask
    memory = compiled.memory_analysis()
    self.assertLess(memory.temp_size_in_bytes, largest)
    sizes = [shape for _, shapes in found for shape in shapes]
    for shape in sizes:
      by_tokens = shape[-2:].count(_N) == 2
      self.assertLessEqual(by_tokens * math.prod(shape), mask, shape)

  @parameterized.parameters("h100", "a100")
  def test_a_layer_arranges_its_arrays_in_one_pass(self, target):
    layer = MoHAttention(
      HeadBudget(_H, 2, 6, _D), implementation="cudnn", dtype=jnp.bfloat16
    )
    x = _shape((_B, _N, _H * _D), jnp.bfloat16)
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
