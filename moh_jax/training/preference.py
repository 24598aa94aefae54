"""Preference: of two answers the better one becomes likelier.

Direct preference optimization, DPO (arXiv:2305.18290): with the log-probability
r(y) that training has given an answer y beyond the reference's, the loss of a
pair is -log sigmoid(beta * (r(better) - r(worse))). The reference is the model
without its adapters, so it costs a forward pass and no memory.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.layers.vocabulary import summed_nats, token_nats
from moh_jax.models.adapters import without_adapters
from moh_jax.models.llm import apply_packed, output_kernel
from moh_jax.training.step import LossFn, Mean, Metrics, add_balance_loss


def make_loss(
  model: nn.Module,
  config: Config,
  scheduled: Callable[[jax.Array], jax.Array | None],
) -> LossFn:
  """Makes the loss: DPO of a batch of pairs plus the balance loss.

  Of every sequence the first segment is the better answer, with its question,
  and the second the worse one (`data.conversations.PreferenceSource`).

  Args:
    model: the network.
    config: config of the run.
    scheduled: from the step to the routed heads per token.
  """
  beta, chunk = config.tune.dpo.beta, config.model.loss_chunk

  def log_probs(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    kernel = output_kernel(params, config.model)
    # Its sums over devices have no derivative.
    x, kernel = jax.lax.stop_gradient((x, kernel))
    return -token_nats(x, kernel, targets, chunk)[0]

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    rngs = {"dropout": rng}
    x, aux = apply_packed(
      model, params, batch, top_k=scheduled(step), rngs=rngs
    )
    own = without_adapters(params)
    gained = log_probs(params, x, batch["targets"])
    known = apply_packed(model, own, batch)[0]
    gained -= log_probs(own, known, batch["targets"])
    sign = jnp.where(batch["segments"] == 1, 1, -1) * batch["weights"]
    margin = beta * (gained * sign).sum(-1)
    # The gradient of the loss in each token's cross-entropy: with it as weight,
    # the logits of all tokens need not be kept for the backward pass.
    slope = beta * jax.nn.sigmoid(-margin)[:, None] * sign / len(sign)
    kernel = output_kernel(params, config.model)
    nats = summed_nats(x, kernel, batch["targets"], slope, chunk)
    losses = jax.nn.softplus(-margin)
    loss = nats + jax.lax.stop_gradient(losses.mean() - nats)
    count = jnp.float32(len(sign))
    metrics = {
      "task_loss": Mean(losses.sum(), count),
      "preferred": Mean((margin > 0).sum().astype(jnp.float32), count),
      "margin": Mean(margin.sum(), count),
    }
    return add_balance_loss(loss, aux, config.train.balance_weight, **metrics)

  return loss_fn
