"""Class-conditional diffusion: the task of MoH-DiT, and its previews."""

import dataclasses
import functools
import logging
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.registry import MissingSplitError
from moh_jax.evaluation.metrics import denoising_losses, denoising_step
from moh_jax.evaluation.pictures import tiles
from moh_jax.layers.partitioning import draw_examples
from moh_jax.models.generation import Decode, image_grid, make_image_sampler
from moh_jax.models.samplers import drop_labels
from moh_jax.runtime.batches import gather, pad_to_shards, put_batch
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import task
from moh_jax.training.step import LossFn, Metrics, add_balance_loss

_LOG = logging.getLogger(__name__)


def make_task(config: Config, decode: Decode | None = None) -> task.Task:
  """Opens the data and builds the task.

  Args:
    config: config of the run.
    decode: maps latents to images, for previews of latent diffusion.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model, or previews of latents lack
      their autoencoder.
  """
  made = task.image_task(
    config,
    make_objective(config),
    _evaluate_if_held_out,
    preview_every=config.sample.every,
    shown=("mse",),
  )
  return dataclasses.replace(made, preview=_make_preview(made, config, decode))


def make_objective(config: Config) -> task.Objective:
  """Builds the network and its loss; no data are read."""
  return task.image_objective(config, make_loss)


def make_evaluate(
  model: nn.Module, config: Config, trained: Metadata
) -> task.Evaluate:
  """Opens the held-out split and prepares its evaluation.

  Args:
    model: maps (x, t, labels) to (output, aux).
    config: the run.
    trained: its class names must be those of the held-out split.

  Raises:
    FileNotFoundError: there is no held-out split.
  """
  eval_step = denoising_step(model, config.diffusion)
  return task.image_evaluation(config, trained, eval_step)


def _evaluate_if_held_out(
  model: nn.Module, config: Config, trained: Metadata
) -> task.Evaluate:
  try:
    return make_evaluate(model, config, trained)
  except MissingSplitError:
    _LOG.warning("%s has no val/: nothing is evaluated", config.data.path)
    return lambda params, mesh: {}


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Makes the loss: denoising loss plus the weighted balance loss.

  Timesteps are sampled uniformly.

  Args:
    model: maps (x, t, labels) to (output, aux).
    config: config of the run.
  """
  diffusion, no_label = config.diffusion, config.model.num_classes

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del step
    time_rng, noise_rng, label_rng, dropout_rng = jax.random.split(rng, 4)
    shape = batch["image"].shape
    draw = functools.partial(
      jax.random.randint, minval=0, maxval=diffusion.steps
    )
    t = draw_examples(draw, time_rng, shape[:1])
    noise = draw_examples(jax.random.normal, noise_rng, shape)
    labels = drop_labels(
      label_rng, batch["label"], no_label, config.model.label_dropout
    )
    rngs = {"dropout": dropout_rng}
    losses, aux = denoising_losses(
      model, diffusion, params, {**batch, "label": labels}, t, noise, rngs
    )
    means = {name: value.mean() for name, value in losses.items()}
    task_loss = means.pop("loss")
    weight = config.train.balance_weight
    return add_balance_loss(task_loss, aux, weight, **means)

  return loss_fn


def _make_preview(
  made: task.Task, config: Config, decode: Decode | None
) -> task.Preview | None:
  """Makes the preview: a grid of samples with fixed noise and labels."""
  if not config.sample.every:
    return None
  paint = make_image_sampler(made.model, config, decode)
  num, zoom = config.sample.num, config.sample.zoom
  classes, seed = config.model.num_classes, config.train.seed
  names = [*(made.class_names or map(str, range(classes))), "none"]
  wanted = np.array(config.sample.labels or range(classes), np.int32)
  wanted = np.where(wanted < 0, classes, wanted)

  def preview(params: Any, mesh: Mesh) -> np.ndarray:
    index = pad_to_shards(np.arange(num, dtype=np.int32), mesh)
    labels = wanted[index % len(wanted)]
    batch = [put_batch(part, mesh) for part in (index, labels)]
    pictures = gather(paint(params, seed, *batch))[:num]
    columns = min(num, max(1, round(num**0.5)))
    shown = [names[label] for label in labels[:num]]
    return image_grid(tiles(pictures, shown, zoom), columns)

  return preview
