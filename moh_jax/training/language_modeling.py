"""Next-token prediction and preferences: the task of MoH-LLM."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config, TuneConfig, without_router
from moh_jax.data import sequences
from moh_jax.data.pipeline import eval_indices
from moh_jax.data.sequences import pack
from moh_jax.evaluation import metrics as metrics_lib
from moh_jax.layers.vocabulary import summed_nats, token_nats
from moh_jax.models.adapters import without_adapters
from moh_jax.models.generation import Decode
from moh_jax.models.llm import apply_packed, output_kernel
from moh_jax.models.registry import make_model
from moh_jax.ops.cross_entropy import summed_divergence
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import task
from moh_jax.training.step import TARGETS, LossFn, Mean, add_balance_loss


def make_task(config: Config, decode: Decode | None = None) -> task.Task:
  """Opens the data and builds the task.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  del decode  # previews are for models that make images
  data, vocab_size = config.data, config.model.vocab_size
  text = sequences.Text(data, vocab_size, "train")
  train = text.stream(config.train.seed)
  objective = make_objective(config)
  return task.Task(
    **vars(objective),
    batches=lambda mesh: task.stream(config, train, mesh, len(text)),
    evaluate=make_evaluate(objective.model, config, Metadata(config)),
    class_names=(),
    tokenizer=text.tokenizer,
    shown=("bits_per_byte",),
    identity=text.identity(),
  )


def make_objective(config: Config) -> task.Objective:
  """Builds the network and its loss; no data are read."""
  model, inputs = make_model(config)
  data, length = config.data, config.data.sequence_length
  tokens, ends = np.zeros(length + 1, np.int32), np.empty(0, int)
  return task.Objective(
    model=model,
    inputs=inputs,
    example=jax.eval_shape(lambda: pack(tokens, ends, length)),
    loss_fn=make_loss(model, config),
    unit="tokens",
    units_per_step=data.batch_size * length,
    by_device=True,
  )


def make_evaluate(
  model: nn.Module, config: Config, trained: Metadata
) -> task.Evaluate:
  """Opens the held-out text and prepares its evaluation.

  Args:
    model: the network.
    config: the run.
    trained: its tokenizer must be that of the text, where known.

  Raises:
    FileNotFoundError: there is no held-out text.
    ValueError: it does not fit the model, or was made with another tokenizer.
  """
  held_out = sequences.Text(config.data, config.model.vocab_size, "val")
  tokenizer, expected = held_out.tokenizer, trained.tokenizer_sha256
  if tokenizer and expected and tokenizer.sha256 != expected:
    raise ValueError(
      f"data.path={config.data.path!r} was made with a tokenizer of sha256 "
      f"{tokenizer.sha256[:16]}, the model was trained with {expected[:16]}"
    )
  eval_step = metrics_lib.language_step(model, config.model)

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    batches = task.held_out_batches(config, held_out, mesh)
    sums = metrics_lib.sum_metrics(eval_step, params, batches)
    nats, tokens = sums["nats"], sums["tokens"]
    if not tokens:
      raise ValueError("the held-out text has no token that is predicted")
    text_bytes = held_out.bytes_of(eval_indices(config, len(held_out)))
    return {
      "bits_per_byte": metrics_lib.bits_per_byte(nats, text_bytes),
      "loss": nats / tokens,
      "perplexity": metrics_lib.perplexity(nats, tokens),
      "accuracy": sums["correct"] / tokens,
      "activated_share": sums["activated_share"] / sums["examples"],
      "tokens": int(tokens),
    }

  return evaluate


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Makes the loss: of the next tokens or of preferences, plus the balance.

  Args:
    model: the network.
    config: config of the run.
  """
  scheduled = top_k_schedule(config.tune, config.model.depth)
  if config.prefers:
    task_loss = _make_preference(model, config)
  else:
    task_loss = _make_prediction(config)

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, dict[str, Any]]:
    rngs = {"dropout": rng}  # for dropout of adapters, and routers that draw
    options = {"top_k": scheduled(step), "rngs": rngs}
    x, aux = apply_packed(model, params, batch, **options)
    loss, metrics = task_loss(params, batch, x, step, options)
    return add_balance_loss(loss, aux, config.train.balance_weight, **metrics)

  return loss_fn


# (parameters, batch, what the output layer reads, step, options of
# `apply_packed` that made it) -> (loss, metrics).
_TaskLoss = Callable[..., tuple[jax.Array, dict[str, Mean]]]


def _make_prediction(config: Config) -> _TaskLoss:
  """Cross-entropy of the next tokens.

  It is the mean over the trained targets of the whole step, so neither
  microbatches nor devices change a target's weight. With `tune.distill` every
  so many steps add a mean of the same kind, the divergence from a teacher: the
  model without its adapters and routers.
  """
  distill, chunk = config.tune.distill, config.model.loss_chunk
  if distill.weight:
    dense = without_router(config.model)
    teacher, _ = make_model(dataclasses.replace(config, model=dense))

  def divergence(params: Any, batch: Any, x: Any, step: jax.Array) -> Mean:
    own = jax.lax.stop_gradient(without_adapters(params))
    has = step % distill.every == 0
    known = jax.lax.cond(
      has,
      lambda: apply_packed(teacher, own, batch)[0],
      lambda: jnp.zeros_like(x),
    )
    weights = has * _shares(batch)
    ours = x, output_kernel(params, config.model)
    theirs = known, output_kernel(own, config.model)
    # Not under `cond`, which would keep copies of the kernels.
    total = summed_divergence(ours, theirs, weights, distill.temperature, chunk)
    return Mean(total, weights.sum())

  def task_loss(
    params: Any, batch: Any, x: jax.Array, step: jax.Array, options: Any
  ) -> tuple[jax.Array, dict[str, Mean]]:
    del options
    weights = _shares(batch)
    # Dividing the weights is cheaper than dividing the loss: the gradient of
    # the output layer, the largest of all, then needs no pass to scale it.
    kernel = output_kernel(params, config.model)
    loss = summed_nats(x, kernel, batch["targets"], weights, chunk)
    metrics = {"task_loss": Mean(loss, weights.sum())}
    if distill.weight:
      metrics["distill_loss"] = mean = divergence(params, batch, x, step)
      loss += distill.weight * mean.total
    return loss, metrics

  return task_loss


def _shares(batch: Any) -> jax.Array:
  """Weights of the targets, whose sum is 1 on average over a step's parts."""
  weights = batch["weights"]
  own = weights.sum(keepdims=True)[0] / len(weights)  # outside a training step
  targets = len(weights) * batch.get(TARGETS, own)[:, None]
  return weights / jnp.where(targets == 0, 1, targets)


def _make_preference(model: nn.Module, config: Config) -> _TaskLoss:
  """Direct preference optimization of pairs of answers (arXiv:2305.18290).

  With the log-probability r(y) that training has given an answer y beyond the
  reference's, the loss of a pair is -log sigmoid(beta * (r(better) -
  r(worse))). The reference is the model without its adapters, so it costs a
  forward pass and no memory. Of every sequence the first segment is the better
  answer, with its question, and the second the worse one
  (`data.conversations.PreferenceSource`).
  """
  beta, chunk = config.tune.dpo.beta, config.model.loss_chunk

  def log_probs(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    kernel = output_kernel(params, config.model)
    # Its sums over devices have no derivative.
    x, kernel = jax.lax.stop_gradient((x, kernel))
    return -token_nats(x, kernel, targets, chunk)[0]

  def task_loss(
    params: Any, batch: Any, x: jax.Array, step: jax.Array, options: Any
  ) -> tuple[jax.Array, dict[str, Mean]]:
    del step
    own = without_adapters(params)
    gained = log_probs(params, x, batch["targets"])
    reference = apply_packed(model, own, batch, **options)[0]
    gained -= log_probs(own, reference, batch["targets"])
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
    return loss, {
      "task_loss": Mean(losses.sum(), count),
      "preferred": Mean((margin > 0).sum().astype(jnp.float32), count),
      "margin": Mean(margin.sum(), count),
    }

  return task_loss


def top_k_schedule(
  config: TuneConfig, depth: int
) -> Callable[[jax.Array], jax.Array | None]:
  """Makes the schedule of the number of routed heads per token.

  Args:
    config: section `tune` of the config.
    depth: number of layers.

  Returns:
    A function from the step [] to top_k [depth] int32; it returns None without
    a schedule, where the model keeps its own top_k.
  """
  if not config.top_k_steps:
    return lambda step: None
  begins = jnp.asarray(config.top_k_steps)
  values = jnp.asarray(config.top_k_values, jnp.int32)

  def at(step: jax.Array) -> jax.Array:
    return jnp.full(depth, values[(step >= begins).sum() - 1])

  return at
