"""Attention for TPUs that are not here: what their compiler makes of it."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels.attention import kernel_attention
from moh_jax.ops.kernels.sizes import block_sizes
from moh_jax.ops.splash import splash_attention
from moh_jax.ops.visible import Visible
from moh_jax.runtime.targets import absent_devices, missing_packages

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
    return splash_attention(q, k, v, visible, scale)
  per_head = q.shape[1] // 2
  sizes = block_sizes("mosaic_tpu", dim, q.dtype, per_head)
  blocks = head_blocks(ActiveHeads(chosen, heads // 2), sizes.rows)
  return kernel_attention(q, k, v, visible, blocks, scale, backend="mosaic_tpu")


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


def _layer(name, form, *, batch=2, tokens=4096, heads=16, dim=128, width=1024):
  """Compiles projections around causal attention, and the gradients."""

  def layer(x, to_q, to_k, to_v, to_out, router):
    q, k, v = (
      jnp.einsum("bnc,chd->bnhd", x, kernel) for kernel in (to_q, to_k, to_v)
    )
    scores = jnp.einsum("bnc,ch->bnh", x, router).astype(jnp.float32)
    least = jax.lax.top_k(scores, heads // 2)[0][..., -1:]
    gates = jnp.where(scores >= least, jax.nn.sigmoid(scores), 0)
    out = _attend(q, k, v, Visible(causal=True), gates != 0, form)
    return jnp.einsum("bnhd,bnh,hdc->bnc", out, gates.astype(out.dtype), to_out)

  def run(grad, *inputs):
    out, pull = jax.vjp(layer, *inputs)
    return out, *pull(grad)

  shapes = (
    (batch, tokens, width), (batch, tokens, width), *[(width, heads, dim)] * 3,
    (heads, dim, width), (width, heads),
  )  # fmt: skip
  return _compile(
    name, run, [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  )


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

  @parameterized.parameters(*_TPUS)
  def test_no_copy_of_queries_or_outputs_around_the_kernels(self, name):
    program = _layer(name, "kernel")
    text = program.as_text()
    self.assertEqual(text.count(_KERNEL), 3)
    copies = [
      (operation, shape)
      for operation, shape in _arrays(text)
      if operation in ("copy", "transpose")
      and math.prod(shape) >= 2 * 4096 * 16 * 128 // 2
    ]
    self.assertEqual(copies, [])

  def test_no_more_memory_than_splash_with_all_heads(self):
    ours, splash = (
      _layer("v5e:2x2", form).memory_analysis().temp_size_in_bytes
      for form in ("kernel", "splash")
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
