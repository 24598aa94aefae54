"""Attention for TPUs that are not here: what their compiler makes of it."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.config.llm import RotaryConfig
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.ops import splash
from moh_jax.ops.attention_forms import Call, Form, Visible
from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels.attention import block_sizes, kernel_attention
from moh_jax.ops.position import rotation
from moh_jax.runtime.devices import absent_devices, missing_packages
from moh_jax.runtime.sharding import unbox

pytestmark = [
  pytest.mark.compiles,
  pytest.mark.skipif(bool(missing_packages("v5e")), reason="needs libtpu"),
]

_TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
_ALL_MASKS = {"causal": True, "masks": True}
_KERNEL = 'custom_call_target="tpu_custom_call"'


def _attend(q, k, v, visible, chosen, form):
  """Attention of the chosen half of the heads, or of all by splash."""
  heads, dim = q.shape[2:]
  scale = dim**-0.5
  if form == "splash":
    return splash.attend(Call(q, k, v, visible, scale), Form("splash"))
  per_head = q.shape[1] // 2
  sizes = block_sizes("mosaic_tpu", dim, q.dtype, per_head)
  blocks = head_blocks(ActiveHeads(chosen, heads // 2), sizes.rows)
  return kernel_attention(
    Call(q, k, v, visible, scale), blocks, backend="mosaic_tpu"
  )


def _compile(name, function, shapes):
  """Compiles a function of arrays for one TPU."""
  mesh = jax.sharding.Mesh(absent_devices(name)[:1], ("data",))
  with jax.set_mesh(mesh):
    sharding = jax.NamedSharding(mesh, jax.P())
    arrays = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      shapes,
    )
    return jax.jit(function).lower(*arrays).compile()


def _core(
  name, tokens, dim, dtype, *, batch=1, heads=4, kv_heads=4, causal=False,
  masks=False, form="kernel",
):  # fmt: skip
  """Compiles attention and its gradients."""
  shape = jax.ShapeDtypeStruct
  q = shape((batch, tokens, heads, dim), dtype)
  k = shape((batch, tokens, kv_heads, dim), dtype)
  others = (
    shape((batch, tokens), bool),
    shape((batch, tokens), jnp.int32),
    shape((batch, tokens, heads), bool),
  )

  def run(q, k, v, grad, key_mask, segments, chosen):
    visible = Visible(causal=causal)
    if masks:
      visible = Visible(key_mask, segments, causal)
    out, pull = jax.vjp(lambda *x: _attend(*x, visible, chosen, form), q, k, v)
    return out, *pull(grad)

  return _compile(name, run, (q, k, k, q, *others))


def _layer(name, heads, dim, *, active, batch=2, tokens=2048, width=1024):
  """Compiles a layer with rotations, half of the heads active or all."""
  budget = HeadBudget(heads, heads // 4, heads // 4, dim)
  if not active:
    budget = HeadBudget(heads, heads, 0, dim)
  layer = MoHAttention(
    budget, causal=True, use_bias=False, dtype=jnp.bfloat16,
    implementation="kernel" if active else "auto",
  )  # fmt: skip
  positions = jnp.arange(tokens)[None]

  def run(params, x, grad):
    places = Places(rotation=rotation(positions, RotaryConfig(), dim))
    out, pull = jax.vjp(
      lambda *args: layer.apply(*args, places=places)[0], params, x
    )
    return out, *pull(grad)

  few = jnp.zeros((1, 8, width))
  params = unbox(jax.eval_shape(lambda: layer.init(jax.random.key(0), few)))
  x = jax.ShapeDtypeStruct((batch, tokens, width), jnp.bfloat16)
  return _compile(name, run, (params, x, x))


def _arrays(text):
  """Name of the operation and shape of every array that a program writes."""
  entry = text[text.index("\nENTRY") :]
  for line in entry.splitlines():
    found = re.match(r" *(?:ROOT )?%\S+ = (.*?) ([a-z-]+)\(", line)
    for dims in re.findall(r"\w+\[([\d,]+)\]", found[1]) if found else ():
      yield found[2], tuple(map(int, dims.split(",")))


class KernelsTest(parameterized.TestCase):
  @parameterized.product(
    name=_TPUS,
    case=(
      (256, 64, "bfloat16", {"batch": 4}),
      (1024, 72, "float32", {"masks": True}),
      (4096, 64, "bfloat16", _ALL_MASKS),
      (4096, 128, "float32", {"causal": True, "kv_heads": 2}),
      (16384, 64, "float32", {}),
      (16384, 256, "bfloat16", _ALL_MASKS),
      (16384, 256, "float32", {"causal": True}),
    ),
  )
  def test_forward_and_gradients_compile(self, name, case):
    tokens, dim, dtype, options = case
    program = _core(name, tokens, dim, jnp.dtype(dtype), **options)
    text = program.as_text()
    self.assertEqual(text.count(_KERNEL), 3)
    logits = options.get("batch", 1) * 4 * tokens * tokens
    for _, shape in _arrays(text):
      self.assertLess(math.prod(shape), logits)

  @parameterized.product(
    name=_TPUS, sizes=((12, 128), (24, 64), (16, 32), (12, 96))
  )
  def test_no_copy_of_queries_or_outputs_around_the_kernels(self, name, sizes):
    program = _layer(name, *sizes, active=True)
    text = program.as_text()
    self.assertEqual(text.count(_KERNEL), 3)
    copies = [
      (operation, shape)
      for operation, shape in _arrays(text)
      if operation in ("copy", "transpose", "reshape")
      and 2048 in shape  # not the kernels
      and math.prod(shape) >= 2 * 2048 * math.prod(sizes) // 2
    ]
    self.assertEqual(copies, [])

  @parameterized.parameters((12, 128), (24, 64))
  def test_no_more_memory_than_splash_with_all_heads(self, heads, dim):
    ours, splash = (
      _layer("v5e:2x2", heads, dim, active=active, batch=16)
      .memory_analysis()
      .temp_size_in_bytes
      for active in (True, False)
    )
    self.assertLess(ours, 1.2 * splash)


class SplashTest(parameterized.TestCase):
  @parameterized.product(
    name=_TPUS,
    case=(
      (1024, 72, "float32", {}),
      (4096, 64, "bfloat16", {"causal": True, "masks": True, "kv_heads": 2}),
      (16384, 256, "float32", {"causal": True}),
    ),
  )
  def test_forward_and_gradients_compile(self, name, case):
    tokens, dim, dtype, options = case
    program = _core(
      name, tokens, dim, jnp.dtype(dtype), form="splash", **options
    )
    text = program.as_text()
    self.assertEqual(text.count(_KERNEL), 3)
    for _, shape in _arrays(text):
      self.assertLess(math.prod(shape), 4 * tokens * tokens)


if __name__ == "__main__":
  absltest.main()
