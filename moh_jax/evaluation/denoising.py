"""Losses of a diffusion model, and their means on held-out examples."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiffusionConfig
from moh_jax.evaluation.means import EvalStep, batch_sums
from moh_jax.layers.router import count_examples
from moh_jax.layers.stack import ModelAux
from moh_jax.models.diffusion import (
  AnyProcess,
  make_process,
  q_sample,
  training_losses,
)

_SEED = 0
_GOLDEN_RATIO = np.uint32(0x9E3779B9)  # its fraction, times 2**32


def make_eval_step(model: nn.Module, diffusion: DiffusionConfig) -> EvalStep:
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
  process = make_process(diffusion.schedule, diffusion.steps)

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    x0, labels = batch["image"], batch["label"]
    t, noise = noise_of_index(batch["index"], x0.shape[1:], process)
    with count_examples(batch["mask"]):
      losses, aux = denoising_losses(
        model, diffusion, process, params, x0, labels, t=t, noise=noise
      )
    losses["activated_share"] = aux.activated_share
    return batch_sums(batch["mask"], **losses)

  return eval_step


def noise_of_index(
  index: jax.Array, shape: tuple[int, ...], process: AnyProcess
) -> tuple[jax.Array, jax.Array]:
  """The timestep and the noise of held-out examples.

  Args:
    index: [B] int32, position of each example in its data.
    shape: of an example.
    process: the training process.

  Returns:
    t [B] int32, spread evenly over the steps, and noise [B, *shape], both
    functions of an example's index alone.
  """
  # Multiples of the golden ratio, modulo 1, spread evenly however many there
  # are; 24 bits of them are exact in float32.
  place = (index.astype(jnp.uint32) * _GOLDEN_RATIO) >> 8
  t = (place / 2**24 * process.num_steps).astype(jnp.int32)
  key = jax.random.key(_SEED)

  def draw(i: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, i), shape)

  return t, jax.vmap(draw)(index)


def denoising_losses(
  model: nn.Module,
  diffusion: DiffusionConfig,
  process: AnyProcess,
  params: Any,
  x0: jax.Array,
  labels: jax.Array,
  *,
  t: jax.Array,
  noise: jax.Array,
  rng: jax.Array | None = None,
) -> tuple[dict[str, jax.Array], ModelAux]:
  """Noises clean examples, denoises them and compares.

  Args:
    model: maps (x, t, labels) to (output, aux).
    diffusion: the objective.
    process: the training process.
    params: of the model.
    x0: [B, X, Y, channels] clean examples.
    labels: [B] int32.
    t: [B] int32 steps.
    noise: [B, X, Y, channels] standard normal.
    rng: in training, key for routers that need one.

  Returns:
    Losses of every example, [B] float32: "loss" (the objective), "mse", and
    "vb" where the variance is learned; and the routers' side values.
  """
  x = q_sample(process, x0, t, noise)
  times = jnp.asarray(process.timesteps)[t]
  rngs = None if rng is None else {"dropout": rng}
  out, aux = model.apply({"params": params}, x, times, labels, rngs=rngs)
  losses = training_losses(
    process,
    diffusion.prediction,
    out,
    x0=x0,
    x=x,
    t=t,
    noise=noise,
    loss_weight=diffusion.loss_weight,
    snr_gamma=diffusion.snr_gamma,
  )
  loss = losses.pop("weighted_mse")
  if "vb" in losses:
    loss = loss + diffusion.vb_weight * losses["vb"]
  return {"loss": loss, **losses}, aux
