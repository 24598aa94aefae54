"""Importance of heads: how much a language model's loss depends on each."""

from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.models.llm import summed_nats


def head_importance(
  model: nn.Module, config: LLMConfig, params: Any, batches: Iterable[Any]
) -> np.ndarray:
  """Mean absolute gradient of the loss with respect to a gate on each head.

  Each head's output is multiplied by a gate of 1. To first order, the gradient
  of a sequence's loss with respect to the gate is the change of the loss when
  the head is removed (arXiv:1905.10650, eq. 2). As in that paper, the
  importances of a layer are divided by their L2 norm, since layers differ in
  the size of their gradients.

  Args:
    model: the network.
    config: model section; every layer has the same number of heads.
    params: parameters of the network.
    batches: batches of packed sequences on the devices, as in training.

  Returns:
    Importances [layers, H] float64, with L2 norm 1 in each layer.

  Raises:
    ValueError: there is no batch, or layers differ in their number of heads.
  """
  if len(set(config.num_heads)) > 1:
    raise ValueError(
      f"model.num_heads={config.num_heads} must be the same in every layer"
    )
  heads = config.num_heads[0]

  def losses(scale: jax.Array, params: Any, batch: Any) -> jax.Array:
    """Sum of the mean losses of all sequences; scale is the heads' gates."""
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
    # Gates per sequence, so that one backward pass gives every gradient.
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
  """Orders the heads of each layer from most to least important.

  Args:
    importance: [layers, H].

  Returns:
    Head numbers by layer, a value of `model.head_order`.
  """
  order = np.argsort(-importance, axis=-1, kind="stable")
  return tuple(tuple(int(head) for head in row) for row in order)


def top_k_by_importance(
  importance: np.ndarray, budgets: Sequence[HeadBudget], order: np.ndarray
) -> tuple[int, ...]:
  """Shares the routed heads that a token uses among layers by importance.

  Layers begin with one routed head; the others go, one after the other, to the
  layer whose next most important routed head is worth most.

  Args:
    importance: [layers, H], comparable between layers.
    budgets: of the layers; the sum of their `top_k` is what is shared.
    order: [layers, H] heads of each layer, the shared ones first.

  Returns:
    A top_k for each layer with the same sum, a value of `model.top_k`; layers
    that route no head keep 0.
  """
  top_k = [min(1, budget.top_k) for budget in budgets]
  worth = []
  for layer, budget in enumerate(budgets):
    if budget.top_k:
      routed = importance[layer][np.asarray(order[layer])[budget.shared :]]
      values = np.sort(routed)[::-1][1:]
      worth += [(-value, layer) for value in values.tolist()]
  left = sum(budget.top_k for budget in budgets) - sum(top_k)
  for _, layer in sorted(worth)[:left]:
    top_k[layer] += 1
  return tuple(top_k)
