"""A tiny language model and its random parameters, for the models' tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig, RotaryConfig, RouterConfig
from moh_jax.models.llm import LLM
from moh_jax.runtime.sharding import init_params, unbox
from tests.training import tiny

CONFIG = tiny.LLM
ROUTERS = ("two_stage", "query_norm", "none")
B, N = 2, 8


def changed(router: str = "two_stage", **changes) -> LLMConfig:
  """The tiny config with another router and other fields."""
  return dataclasses.replace(CONFIG, router=RouterConfig(router), **changes)


UNEQUAL = changed(top_k=(1, 3))
TIED = changed("query_norm", tie_embeddings=True, num_kv_heads=4)
NORMED = changed(
  "query_norm",
  qk_norm=True,
  rope=RotaryConfig(theta=50.0, scaling="yarn", factor=4.0, original_length=4),
)
BIASED = changed(qkv_bias=True, out_bias=True, mlp_bias=True)


def random_tokens(batch: int = B, length: int = N) -> jax.Array:
  """Tokens of which each occurs once."""
  order = np.random.default_rng(0).permutation(CONFIG.vocab_size)
  return jnp.asarray(order[: batch * length].reshape(batch, length), jnp.int32)


@functools.cache
def random_variables(config: LLMConfig):
  """Random parameters that make routers, norms and biases matter."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = functools.partial(init_params, LLM(config), jax.random.key(0))
  shapes = unbox(jax.eval_shape(init, [tokens]))
  rng = np.random.default_rng(1)
  return {
    "params": jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes
    )
  }


@functools.cache
def _recording(config: LLMConfig):
  """The model, compiled once per config."""
  apply = functools.partial(LLM(config).apply, mutable=["intermediates"])
  return jax.jit(apply)


def record(config: LLMConfig, variables=None, tokens=None, **inputs):
  """Logits and side values; and every layer's routing. One program a config."""
  tokens = random_tokens() if tokens is None else tokens
  variables = random_variables(config) if variables is None else variables
  whole = {
    "positions": jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
    "segments": jnp.ones_like(tokens),
    "token_mask": jnp.ones(tokens.shape, bool),
  }
  outputs, recorded = _recording(config)(variables, tokens, **whole | inputs)
  return outputs, recorded.get("intermediates")


def forward(config: LLMConfig = CONFIG, variables=None, **inputs):
  """Logits and side values."""
  return record(config, variables, **inputs)[0]
