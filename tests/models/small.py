"""Tiny networks of every family, with random parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import (
  DiTConfig,
  LLMConfig,
  RotaryConfig,
  RouterConfig,
  ViTConfig,
  get_family,
  imported,
)
from moh_jax.runtime.parameters import abstract_params, unbox
from tests.training import tiny

# One stage of 2 x 2 tokens of images of 8 x 8 pixels.
ONE_STAGE = ViTConfig(
  image_size=(8, 8),
  num_classes=6,
  patch_stride=4,
  embed_dims=(8,),
  depths=(1,),
  num_heads=(4,),
  shared_heads=(1,),
  top_k=(1,),
  mlp_ratios=(2,),
  sr_ratios=(1,),
)
# Two stages, the first with window attention.
TWO_STAGES = ViTConfig(
  channels=3,
  image_size=(16, 16),
  num_classes=5,
  embed_dims=(8, 16),
  depths=(2, 1),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
)
# A pooled stage of two blocks and a full one; 2 + 3 active of 2 x 2 + 4 heads.
VIT = dataclasses.replace(TWO_STAGES, channels=1, top_k=(0, 1))
# Images that are no squares; channels and classes are those of the data.
TALL_VIT = dataclasses.replace(
  TWO_STAGES,
  channels=None,
  num_classes=None,
  image_size=(16, 8),
  patch_stride=2,
  embed_dims=(8, 12),
  depths=(1, 2),
)
# Two equal layers of 2 + 1 active heads of 4, and one of 6 that are all on.
DIT = DiTConfig(
  input_size=(4, 6),
  channels=3,
  num_classes=5,
  width=8,
  num_heads=(4, 4, 6),
  head_dim=4,
  shared_heads=(2, 2, 6),
  top_k=(1, 1, 0),
)
CONFIG = LLM = tiny.LLM
ROUTERS = ("two_stage", "query_norm", "none")
B, N = 2, 8  # sequences and tokens
_SPREADS = {"vit": 0.2, "dit": 0.25, "llm": 0.5}  # of parameters


def changed(router: str = "two_stage", **changes) -> LLMConfig:
  """The language model with another router and other fields."""
  return dataclasses.replace(LLM, router=RouterConfig(router), **changes)


UNEQUAL = changed(top_k=(1, 3))
TIED = changed("query_norm", tie_embeddings=True, num_kv_heads=4)
NORMED = changed(
  "query_norm",
  qk_norm=True,
  rope=RotaryConfig(theta=50.0, scaling="yarn", factor=4.0, original_length=4),
)
BIASED = changed(qkv_bias=True, out_bias=True, mlp_bias=True)


def network(config: Any) -> Any:
  """The Linen module."""
  return imported(get_family(config.family).network)(config)


def random_tokens(batch: int = B, length: int = N) -> jax.Array:
  """Tokens of which each occurs once."""
  order = np.random.default_rng(0).permutation(LLM.vocab_size)
  return jnp.asarray(order[: batch * length].reshape(batch, length), jnp.int32)


def inputs(config: Any) -> tuple[jax.Array, ...]:
  """Two examples: images; noisy images, timesteps and labels; or tokens."""
  if config.family == "llm":
    return (random_tokens(),)
  x = np.random.default_rng(0).normal(size=(B, *config.input_shape))
  others = (jnp.array([7, 900]), jnp.array([4, 1]))
  return (jnp.float32(x), *(others if config.family == "dit" else ()))


@functools.cache
def random_variables(config: Any) -> dict[str, Any]:
  """Random parameters that make routers, norms and biases matter."""
  shapes = unbox(abstract_params(network(config), inputs(config)))
  rng, spread = np.random.default_rng(1), _SPREADS[config.family]

  def draw(path, x):
    offset = path[-1].key == "scale" and config.family == "vit"
    return jnp.asarray(rng.normal(size=x.shape) * spread + offset, x.dtype)

  return {"params": jax.tree_util.tree_map_with_path(draw, shapes)}


@functools.cache
def gradient(config: Any) -> tuple[Any, Any]:
  """Output and side values; and gradients of a loss of both."""

  def loss(variables):
    out, aux = network(config).apply(variables, *inputs(config))
    return jnp.sum(jnp.sin(out)) + aux.balance_loss, (out, aux)

  call = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, outputs), grads = call(random_variables(config))
  return outputs, grads


@functools.cache
def _recording(config: Any) -> Any:
  apply = functools.partial(network(config).apply, mutable=["intermediates"])
  return jax.jit(apply)


def record(config: Any, *given, variables=None, **options) -> tuple[Any, Any]:
  """Output and side values; and what is recorded. One program a config."""
  given = given or inputs(config)
  if config.family == "llm":
    (tokens,) = given
    whole = {
      "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
      "segments": jnp.ones_like(tokens),
      "token_mask": jnp.ones(tokens.shape, bool),
    }
    options = whole | options
  variables = random_variables(config) if variables is None else variables
  outputs, recorded = _recording(config)(variables, *given, **options)
  return outputs, recorded.get("intermediates")


def forward(config: Any = LLM, *given, **options) -> tuple[Any, Any]:
  """Output and side values; arguments as of `record`."""
  return record(config, *given, **options)[0]
