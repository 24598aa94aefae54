"""Metrics of held-out data: sums over batches, and what the tasks sum."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from moh_jax.config import DiffusionConfig, LLMConfig
from moh_jax.layers.router import count_examples
from moh_jax.layers.stack import ModelAux
from moh_jax.layers.vocabulary import token_nats
from moh_jax.models.diffusion import make_process, q_sample, training_losses
from moh_jax.models.llm import apply_packed, output_kernel

_SEED = 0
_GOLDEN_RATIO = np.uint32(0x9E3779B9)  # its fraction, times 2**32
# (params, batch) -> {name: [] float32 sum over the batch's examples}, with the
# number of "examples"; padded examples (mask 0) count nothing.
EvalStep = Callable[[Any, Any], dict[str, jax.Array]]


def batch_sums(mask: jax.Array, **values: jax.Array) -> dict[str, jax.Array]:
  """Sums over one batch, as an `EvalStep` gives them.

  Args:
    mask: [B] float32, 0 for padded examples.
    **values: by name, [B] metric of each example, or [] their mean.

  Returns:
    "examples" and the sums of `values`.
  """
  sums = {name: (value * mask).sum() for name, value in values.items()}
  return {"examples": mask.sum(), **sums}


def mean_metrics(
  eval_step: EvalStep, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
  """Means over a split: `sum_metrics` over the number of examples."""
  total = sum_metrics(eval_step, params, batches)
  examples = int(total.pop("examples"))
  means = {name: value / examples for name, value in total.items()}
  return {**means, "examples": examples}


def sum_metrics(
  eval_step: EvalStep, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
  """Sums over a split.

  Args:
    eval_step: sums over one batch, jitted.
    params: the parameters.
    batches: global batches with "mask", on the devices.

  Returns:
    The sum of every metric, the number of "examples" among them.

  Raises:
    ValueError: there is no batch.
  """
  sums: list[dict[str, jax.Array]] = []
  for batch in batches:
    sums.append(eval_step(params, batch))
    # Two batches in flight: the device is busy, its memory not full of them.
    jax.block_until_ready(sums[-2:][0])
  if not sums:
    raise ValueError("the split to evaluate is empty")
  host = jax.device_get(sums)  # at once, not one scalar after the other
  return {name: sum(float(s[name]) for s in host) for name in host[0]}


def one_late(results: Iterable[Any]) -> Iterator[Any]:
  """Yields results one behind, so that devices compute while the host reads."""
  waiting: list[Any] = []  # one, not all: memory would be full of them
  for result in results:
    yield from waiting
    waiting = [result]
  yield from waiting


def bits_per_byte(nats: float, num_bytes: float) -> float:
  """Bits that a model needs for a byte of text, whatever its tokenizer.

  Args:
    nats: summed cross-entropy of the text's tokens.
    num_bytes: of the text as UTF-8, more than 0.
  """
  return nats / math.log(2) / num_bytes


def perplexity(nats: float, count: int) -> float:
  """Exponential of the mean nats per unit; infinite where it is too large.

  Args:
    nats: summed cross-entropy.
    count: units, at least 1.
  """
  try:
    return math.exp(nats / count)
  except OverflowError:
    return math.inf


def classification_step(model: nn.Module) -> EvalStep:
  """Jitted sums over one batch of labelled images.

  Args:
    model: maps images to (logits, aux).

  Returns:
    (params, batch) -> sums of "accuracy", "loss", "activated_share" and, of
    more than five classes, "top5_accuracy". Where logits are NaN nothing is
    right.
  """

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    labels = batch["label"]
    with count_examples(batch["mask"]):
      logits, aux = model.apply({"params": params}, batch["image"])
    shown = 5 if logits.shape[-1] > 5 else 1
    hits = jax.lax.top_k(logits, shown)[1] == labels[:, None]
    hits &= ~jnp.isnan(logits).any(-1, keepdims=True)
    top5 = {"top5_accuracy": hits.any(-1)} if shown > 1 else {}
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return batch_sums(
      batch["mask"],
      accuracy=hits[:, 0],
      activated_share=aux.activated_share,
      loss=loss,
      **top5,
    )

  return eval_step


def language_step(model: nn.Module, config: LLMConfig) -> EvalStep:
  """Jitted sums over one batch of packed sequences.

  Args:
    model: the network.
    config: its section.

  Returns:
    (params, batch) -> sums over the batch: "nats" and "tokens" of the targets
    that count, those the model gets right ("correct"), and per sequence
    "examples" and "activated_share".
  """

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    is_text = batch["segments"] > 0
    x, aux = apply_packed(model, params, batch, token_mask=is_text)
    kernel, chunk = output_kernel(params, config), config.loss_chunk
    nats, correct = token_nats(x, kernel, batch["targets"], chunk)
    weights = batch["weights"]
    return {
      **batch_sums(batch["mask"], activated_share=aux.activated_share),
      "nats": (nats * weights).sum(),
      "tokens": weights.sum(),
      "correct": (correct * weights).sum(),
    }

  return eval_step


def denoising_step(model: nn.Module, diffusion: DiffusionConfig) -> EvalStep:
  """Jitted sums over one batch.

  Each example has one timestep and one noise, functions of its index alone:
  metrics of different steps, models and devices are comparable.

  Args:
    model: maps (x, t, labels) to (output, aux).
    diffusion: the process and the objective.

  Returns:
    (params, batch) -> sums of "loss" (weighted squared error and bound), "mse",
    "vb" where the variance is learned, and "activated_share".
  """

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    shape = batch["image"].shape[1:]
    t, noise = noise_of_index(batch["index"], shape, diffusion.steps)
    with count_examples(batch["mask"]):
      losses, aux = denoising_losses(model, diffusion, params, batch, t, noise)
    losses["activated_share"] = aux.activated_share
    return batch_sums(batch["mask"], **losses)

  return eval_step


def noise_of_index(
  index: jax.Array, shape: tuple[int, ...], steps: int
) -> tuple[jax.Array, jax.Array]:
  """The timestep and the noise of held-out examples.

  Args:
    index: [B] int32, position of each example in its data.
    shape: of an example.
    steps: of the training process.

  Returns:
    t [B] int32, spread evenly over the steps, and noise [B, *shape], both
    functions of an example's index alone.
  """
  # Multiples of the golden ratio, modulo 1, spread evenly however many there
  # are; 24 bits of them are exact in float32.
  place = (index.astype(jnp.uint32) * _GOLDEN_RATIO) >> 8
  t = (place / 2**24 * steps).astype(jnp.int32)
  key = jax.random.key(_SEED)

  def draw(i: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, i), shape)

  return t, jax.vmap(draw)(index)


def denoising_losses(
  model: nn.Module,
  diffusion: DiffusionConfig,
  params: Any,
  batch: Mapping[str, jax.Array],
  t: jax.Array,
  noise: jax.Array,
  rngs: Mapping[str, jax.Array] | None = None,
) -> tuple[dict[str, jax.Array], ModelAux]:
  """Noises clean examples, denoises them and compares.

  Args:
    model: maps (x, t, labels) to (output, aux).
    diffusion: the process and the objective.
    params: of the model.
    batch: "image" [B, X, Y, channels], clean examples, and "label" [B] int32.
    t: [B] int32 steps.
    noise: [B, X, Y, channels] standard normal.
    rngs: in training, for routers that need one.

  Returns:
    Losses of every example, see `training_losses`, and the routers' side
    values.
  """
  process = make_process(diffusion.schedule, diffusion.steps)
  x0 = batch["image"]
  x = q_sample(process, x0, t, noise)
  times = jnp.asarray(process.timesteps)[t]
  out, aux = model.apply(
    {"params": params}, x, times, batch["label"], rngs=rngs
  )
  return training_losses(process, diffusion, out, x0, x, t, noise), aux
