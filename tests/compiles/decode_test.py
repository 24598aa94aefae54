"""Decoding compiled for GPUs: how the program of a span uses a cache.

XLA may copy what a kernel reads, or fetch all of it beforehand; that shows only
in the compiled program of a whole model.
"""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.config.heads import RouterConfig
from moh_jax.config.llm import LLMConfig, Sampling
from moh_jax.inference.decoding import Decoding, make_decode, span_numbers
from moh_jax.inference.generate import serving_params
from moh_jax.models.llm import LLM
from moh_jax.runtime.devices import absent_devices, missing_packages

pytestmark = pytest.mark.compiles

_TARGETS = ("h100", "a100")
_BATCH, _SLOTS, _LAYERS = 16, 1280, 2


def _compiled(target: str, kv_heads: int, head_dim: int):
  """The program that writes a span of tokens, and the shapes of its cache."""
  config = LLMConfig(
    vocab_size=256, width=256, mlp_dim=512, head_dim=head_dim,
    num_heads=(8,) * _LAYERS, num_kv_heads=kv_heads,
    shared_heads=(1,) * _LAYERS, top_k=(3,) * _LAYERS,
    router=RouterConfig("query_norm"), max_length=_SLOTS, dtype="bfloat16",
  )  # fmt: skip
  model = LLM(config, unrolled=True)

  def arguments():
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = LLM(config).init(jax.random.key(0), tokens)["params"]
    zeros = jnp.zeros(_BATCH, jnp.int32)
    state = Decoding(
      cache=model.new_cache(_BATCH, _SLOTS, "bfloat16"),
      slot=jnp.int32(0),
      padding=zeros,
      logits=jnp.zeros((_BATCH, config.vocab_size)),
      finished=zeros > 0,
      rows=zeros,
      written=jnp.int32(0),
    )
    return serving_params(nn.unbox(params), config), state

  mesh = jax.sharding.Mesh(absent_devices(target)[:1], ("data",))
  whole = jax.NamedSharding(mesh, jax.P())
  params, state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
    jax.eval_shape(arguments),
  )
  numbers = span_numbers(Sampling(max_new_tokens=8), 8)
  with jax.set_mesh(mesh):
    decode = make_decode(model, (2,), 8)
    lowered = decode.lower(params, state, numbers, True, False)
    return lowered.compile(), jax.tree.leaves(state.cache)


def _made(text: str, cache: list) -> set[str]:
  """Operations that make an array of the shape of one layer's keys."""
  *lead, slots, dim = cache[0].shape
  found = set()
  for axes in (lead, [math.prod(lead)]):
    for last in ((slots, dim), (dim, slots)):
      array = re.escape(f"bf16[{','.join(map(str, (*axes, *last)))}]")
      found |= set(re.findall(rf" = \(*{array}\S* ([\w-]+)\(", text))
  return found


class CompiledTest(parameterized.TestCase):
  @parameterized.product(target=_TARGETS, heads=((8, 64), (2, 128)))
  def test_step_reads_the_cache_in_place(self, target, heads):
    if missing := missing_packages(target):
      self.skipTest(f"needs {', '.join(missing)}")
    compiled, cache = _compiled(target, *heads)
    text = compiled.as_text()
    kernels = re.findall(r"custom-call\(.*moh_decode", text)
    self.assertLen(kernels, _LAYERS)
    # Nothing makes another array of a cache's size than the one that is kept.
    in_place = {"parameter", "get-tuple-element", "bitcast", "fusion"}
    self.assertEqual(_made(text, cache) - in_place, {"dynamic-update-slice"})
    size = sum(x.size * x.dtype.itemsize for x in cache)
    memory = compiled.memory_analysis()
    self.assertGreaterEqual(memory.alias_size_in_bytes, size)
    one_layer = cache[0].size * cache[0].dtype.itemsize
    self.assertLess(memory.temp_size_in_bytes, one_layer)
