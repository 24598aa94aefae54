"""How much a language model's loss depends on each of its heads."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig
from moh_jax.models.llm_output import summed_nats


def head_importance(
  model: nn.Module, config: LLMConfig, params: Any, batches: Iterable[Any]
) -> np.ndarray:
  """Mean absolute gradient of a sequence's loss to a head's gate.

  The head's output is multiplied by 1; the derivative of the loss to that 1 is
  what the head is worth to first order (arXiv:1905.10650, eq. 2). In every
  layer the importances are divided by their root of the sum of squares, as
  there: layers differ in the size of their gradients.

  Args:
    model: the network.
    config: its section; every layer has the same number of heads.
    params: its parameters.
    batches: packed sequences as the training stream gives them, on the devices.

  Returns:
    [layers, H] float64.

  Raises:
    ValueError: there is no batch, or layers differ in their number of heads.
  """
  if len(set(config.num_heads)) > 1:
    raise ValueError(
      f"model.num_heads={config.num_heads} must be the same in every layer"
    )
  heads = config.num_heads[0]

  def losses(scale: jax.Array, params: Any, batch: Any) -> jax.Array:
    """Sum over the sequences of each one's mean loss."""
    x, _ = model.apply(
      {"params": params},
      batch["inputs"],
      positions=batch["positions"],
      segments=batch["segments"],
      head_scale=scale,
      with_logits=False,
    )
    weights = batch["weights"]
    targets = jnp.maximum(weights.sum(-1, keepdims=True), 1.0)
    return summed_nats(x, params, config, batch["targets"], weights / targets)

  @jax.jit
  def measure(params: Any, batch: Any) -> jax.Array:
    # A gate of its own for every sequence: one backward pass tells them apart.
    size = batch["inputs"].shape[0]
    ones = jnp.ones((config.depth, size, 1, heads))
    return jnp.abs(jax.grad(losses)(ones, params, batch)).sum((1, 2))

  total, count = np.zeros((config.depth, heads)), 0
  for batch in batches:
    total += np.asarray(measure(params, batch), np.float64)
    count += batch["inputs"].shape[0]
  if not count:
    raise ValueError("there is no text to measure heads on")
  importance = total / count
  norms = np.sqrt(np.square(importance).sum(-1, keepdims=True))
  return importance / np.where(norms > 0, norms, 1.0)


def order_by_importance(importance: np.ndarray) -> tuple[tuple[int, ...], ...]:
  """Per layer, its heads from the most to the least important.

  Args:
    importance: [layers, H].

  Returns:
    What `model.head_order` takes.
  """
  order = np.argsort(-importance, axis=-1, kind="stable")
  return tuple(tuple(int(head) for head in row) for row in order)
