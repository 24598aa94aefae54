"""Class-conditional diffusion: the task of MoH-DiT."""

import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.sources import MissingSplitError
from moh_jax.data.pipeline import train_images
from moh_jax.data.sources import make_source
from moh_jax.diffusion.guidance import drop_labels
from moh_jax.diffusion.process import make_process
from moh_jax.evaluation.denoising import denoising_losses, make_eval_step
from moh_jax.models.generation import Decode, image_grid, make_image_sampler
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.step import LossFn, Mean, Metrics, add_balance_loss
from moh_jax.training.task import (
  Evaluate,
  Objective,
  Preview,
  Task,
  evaluate_held_out,
  image_objective,
  stream,
)

_LOG = logging.getLogger(__name__)
_QUARTILES = 4


def make_task(config: Config, decode: Decode | None = None) -> Task:
  """Opens the data and builds the task.

  Args:
    config: config of the run.
    decode: maps latents to images, for previews of latent diffusion.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model, or previews of latents lack
      their autoencoder.
  """
  train = make_source(config, "train")
  objective = make_objective(config)
  model = objective.model
  try:
    evaluate = make_evaluate(model, config, Metadata(config, train.class_names))
  except MissingSplitError:
    _LOG.warning("%s has no val/: nothing is evaluated", config.data.path)
    evaluate = _no_metrics
  return Task(
    **vars(objective),
    batches=lambda mesh: stream(config, train_images(config, train), mesh),
    evaluate=evaluate,
    class_names=train.class_names,
    preview=_make_preview(model, config, decode),
    preview_every=config.sample.every,
    shown=("mse",),
    identity={"train": train.identity()},
    encoder_sha256=getattr(train, "encoder_sha256", ""),
  )


def make_objective(config: Config) -> Objective:
  """Builds the network and its loss; no data are read."""
  network = make_model(config)
  return image_objective(config, network, make_loss(network[0], config))


def make_evaluate(
  model: nn.Module, config: Config, trained: Metadata
) -> Evaluate:
  """Opens the held-out split and prepares its evaluation.

  Args:
    model: maps (x, t, labels) to (output, aux).
    config: the run.
    trained: its class names must be those of the held-out split.

  Raises:
    FileNotFoundError: there is no held-out split.
  """
  eval_step = make_eval_step(model, config.diffusion)
  return evaluate_held_out(config, trained.class_names, eval_step)


def _no_metrics(params: Any, mesh: Mesh) -> dict[str, float]:
  del params, mesh
  return {}


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Makes the loss: denoising loss plus the weighted balance loss.

  Timesteps are sampled uniformly. The squared error is also a metric for each
  quarter of the timesteps, without a value where a batch has none of them.

  Args:
    model: maps (x, t, labels) to (output, aux).
    config: config of the run.
  """
  diffusion, no_label = config.diffusion, config.model.num_classes
  process = make_process(diffusion.schedule, diffusion.steps)

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del step
    time_rng, noise_rng, label_rng = jax.random.split(rng, 3)
    x0 = batch["image"]
    t = jax.random.randint(time_rng, x0.shape[:1], 0, process.num_steps)
    noise = jax.random.normal(noise_rng, x0.shape)
    labels = drop_labels(
      label_rng, batch["label"], no_label, config.model.label_dropout
    )
    losses, aux = denoising_losses(
      model,
      diffusion,
      process,
      params,
      x0,
      labels,
      t=t,
      noise=noise,
      rng=jax.random.fold_in(rng, 0),
    )
    means = {name: value.mean() for name, value in losses.items()}
    task_loss = means.pop("loss")
    means |= _by_quartile(losses["mse"], t, process.num_steps)
    weight = config.train.balance_weight
    return add_balance_loss(task_loss, aux, weight, **means)

  return loss_fn


def _by_quartile(mse: jax.Array, t: jax.Array, num_steps: int) -> Metrics:
  quartile = t * _QUARTILES // num_steps
  out = {}
  for index in range(_QUARTILES):
    inside = quartile == index
    total = jnp.where(inside, mse, 0.0).sum()
    out[f"mse_quartile{index + 1}"] = Mean(total, inside.sum())
  return out


def _make_preview(
  model: nn.Module, config: Config, decode: Decode | None
) -> Preview | None:
  """Makes the preview: a grid of samples with fixed noise and labels."""
  if not config.sample.every:
    return None
  if config.diffusion.space == "latent" and decode is None:
    raise ValueError(
      f"sample.every={config.sample.every} must be 0, or --vae must name the "
      "autoencoder that shows latents"
    )
  paint = make_image_sampler(model, config, decode)
  num, zoom = config.sample.num, config.sample.zoom
  classes, seed = config.model.num_classes, config.train.seed
  wanted = np.array(config.sample.labels or range(classes), np.int32)
  wanted = np.where(wanted < 0, classes, wanted)

  def preview(params: Any, mesh: Mesh) -> np.ndarray:
    index = sharding.pad_to_shards(np.arange(num, dtype=np.int32), mesh)
    batch = (index, wanted[index % len(wanted)])
    batch = [sharding.put_batch(part, mesh) for part in batch]
    pictures = sharding.gather(paint(params, seed, *batch), mesh)[:num]
    grid = image_grid(pictures, columns=min(num, max(1, round(num**0.5))))
    return grid.repeat(zoom, axis=0).repeat(zoom, axis=1)

  return preview
