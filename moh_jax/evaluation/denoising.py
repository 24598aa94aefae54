"""Losses of a diffusion model on held-out examples."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import DiffusionConfig
from moh_jax.diffusion.objective import training_losses
from moh_jax.diffusion.process import make_process, q_sample
from moh_jax.evaluation.means import EvalStep

_SEED = 0
_GOLDEN_RATIO = 0.618033988749895


def make_eval_step(model: nn.Module, diffusion: DiffusionConfig) -> EvalStep:
  """Jitted sums over one batch.

  Each example has one timestep and one noise, functions of its index alone:
  figures of different steps, models and devices are comparable.

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
    x0, labels, index = batch["image"], batch["label"], batch["index"]
    # Multiples of the golden ratio spread evenly, however many there are.
    place = jnp.mod(index * _GOLDEN_RATIO, 1.0)
    t = (place * process.num_steps).astype(jnp.int32)
    key = jax.random.key(_SEED)

    def draw(i: jax.Array) -> jax.Array:
      return jax.random.normal(jax.random.fold_in(key, i), x0.shape[1:])

    noise = jax.vmap(draw)(index)
    x = q_sample(process, x0, t, noise)
    out, aux = model.apply({"params": params}, x, t, labels)
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
    mask = batch["mask"]
    loss = losses.pop("weighted_mse")
    loss = loss + diffusion.vb_weight * losses.get("vb", 0.0)
    return {
      "examples": mask.sum(),
      "loss": (loss * mask).sum(),
      **{name: (value * mask).sum() for name, value in losses.items()},
      "activated_share": aux.activated_share * mask.sum(),
    }

  return eval_step
