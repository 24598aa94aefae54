"""The language model's output layer, apart from its blocks.

Training and scoring apply it to a part of the tokens at a time, so that not all
logits exist at once.

Shapes: B batch, N tokens, C width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import LLMConfig
from moh_jax.layers import vocabulary
from moh_jax.layers.linear import product


def output_kernel(params: Any, config: LLMConfig) -> jax.Array:
  """Returns the output layer's weights [C, V] from a model's parameters."""
  if config.tie_embeddings:
    return params["embed"]["embedding"].T
  return params["head"]["kernel"]


def output_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Applies the output layer: x [..., C], kernel [C, V] to [..., V] float32."""
  return jnp.matmul(
    x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
  )


def unrolled_logits(x: jax.Array, params: Any, config: LLMConfig) -> jax.Array:
  """Applies the output layer of unrolled parameters (`llm_params.unroll`).

  Args:
    x: [..., C] what the output layer reads.
    params: of the model, unrolled.
    config: the model.

  Returns:
    [..., V] float32.
  """
  tied = config.tie_embeddings
  kernel = params["embed"]["embedding"] if tied else params["head"]["kernel"]
  kernel = kernel.astype(x.dtype)  # [V, C]
  return product(x, kernel, output_major=True, dtype=jnp.float32)


def summed_nats(
  x: jax.Array,
  params: Any,
  config: LLMConfig,
  targets: jax.Array,
  weights: jax.Array,
) -> jax.Array:
  """Weighted sum of the targets' cross-entropies, a few logits at a time.

  Args:
    x: [B, N, C] what the output layer reads.
    params: of the model.
    config: the model.
    targets: [B, N] int32.
    weights: [B, N] float32.

  Returns:
    [] float32.
  """
  kernel = output_kernel(params, config)
  return vocabulary.summed_nats(x, kernel, targets, weights, config.loss_chunk)


def token_nats(
  x: jax.Array, params: Any, config: LLMConfig, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each token, a few logits at a time.

  Args:
    x: [B, N, C] what the output layer reads.
    params: of the model.
    config: the model.
    targets: [B, N] int32.

  Returns:
    [B, N] float32 nats; and [B, N] bool, True if no logit is larger.
  """
  kernel = output_kernel(params, config)
  return vocabulary.token_nats(x, kernel, targets, config.loss_chunk)
