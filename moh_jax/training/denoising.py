"""Class-conditional diffusion: the task of MoH-DiT, previews and FID."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.registry import MissingSplitError
from moh_jax.convert.inception import load_inception
from moh_jax.data.pipeline import held_out_images
from moh_jax.data.sources import make_source
from moh_jax.evaluation.fid import (
  Gaussian,
  frechet_distance,
  moments,
  read_statistics,
)
from moh_jax.evaluation.image_metrics import make_extractor
from moh_jax.evaluation.metrics import (
  denoising_losses,
  denoising_step,
  mean_metrics,
)
from moh_jax.evaluation.pictures import tiles
from moh_jax.layers.partitioning import draw_examples
from moh_jax.models import inception
from moh_jax.models.generation import Decode, image_grid, make_image_sampler
from moh_jax.models.registry import make_model, params_sha256
from moh_jax.models.samplers import drop_labels
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.step import LossFn, Mean, Metrics, add_balance_loss
from moh_jax.training.stopping import interruptible
from moh_jax.training.task import (
  Evaluate,
  Objective,
  Preview,
  Task,
  held_out_batches,
  image_objective,
  image_task,
)

# The decoder of latents takes far more memory for an image than the network in
# an evaluation, whose batches are larger. `sample` takes 64 at a time too.
_MOST_AT_ONCE = 64
_LOG = logging.getLogger(__name__)
_QUARTILES = 4


def make_task(config: Config, decode: Decode | None = None) -> Task:
  """Opens the data and builds the task.

  Args:
    config: config of the run.
    decode: maps latents to images, for previews and FID of latent diffusion.

  Raises:
    FileNotFoundError: data is missing, or a file that `sample` names.
    ValueError: the data does not fit the model, or previews of latents lack
      their autoencoder, or the files of FID do not belong together.
  """
  objective = make_objective(config)
  task = image_task(
    config,
    objective,
    _evaluate_if_held_out,
    preview=_make_preview(objective.model, config, decode),
    preview_every=config.sample.every,
    shown=("mse",),
  )
  if not config.sample.fid_images:
    return task
  fid = make_fid(config, *_inception(config), decode)
  return dataclasses.replace(
    task,
    evaluate=lambda params, mesh: (
      task.evaluate(params, mesh) | fid(params, mesh)
    ),
  )


def make_objective(config: Config) -> Objective:
  """Builds the network and its loss; no data are read."""
  return image_objective(config, make_loss)


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
  ready = held_out_images(
    config, make_source(config, "val", trained.class_names)
  )
  eval_step = denoising_step(model, config.diffusion)

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    batches = held_out_batches(config, ready, mesh)
    return mean_metrics(eval_step, params, batches)

  return evaluate


def _evaluate_if_held_out(
  model: nn.Module, config: Config, trained: Metadata
) -> Evaluate:
  try:
    return make_evaluate(model, config, trained)
  except MissingSplitError:
    _LOG.warning("%s has no val/: nothing is evaluated", config.data.path)
    return lambda params, mesh: {}


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Makes the loss: denoising loss plus the weighted balance loss.

  Timesteps are sampled uniformly. The squared error is also a metric for each
  quarter of the timesteps, without a value where a batch has none of them.

  Args:
    model: maps (x, t, labels) to (output, aux).
    config: config of the run.
  """
  diffusion, no_label = config.diffusion, config.model.num_classes

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del step
    time_rng, noise_rng, label_rng = jax.random.split(rng, 3)
    shape = batch["image"].shape
    draw = functools.partial(
      jax.random.randint, minval=0, maxval=diffusion.steps
    )
    t = draw_examples(draw, time_rng, shape[:1])
    noise = draw_examples(jax.random.normal, noise_rng, shape)
    labels = drop_labels(
      label_rng, batch["label"], no_label, config.model.label_dropout
    )
    rngs = {"dropout": jax.random.fold_in(rng, 0)}
    losses, aux = denoising_losses(
      model, diffusion, params, {**batch, "label": labels}, t, noise, rngs
    )
    means = {name: value.mean() for name, value in losses.items()}
    task_loss = means.pop("loss")
    means |= _by_quartile(losses["mse"], t, diffusion.steps)
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
    pictures = sharding.gather(paint(params, seed, *batch))[:num]
    columns = min(num, max(1, round(num**0.5)))
    return image_grid(tiles(pictures, zoom=zoom), columns)

  return preview


def _inception(
  config: Config,
) -> tuple[Gaussian, Callable[[jax.Array, Mesh], jax.Array]]:
  """The features of real images, and what extracts those of samples.

  Raises:
    FileNotFoundError: a file that the section `sample` names is missing.
    ValueError: the files do not belong together.
  """
  sample = config.sample
  sizes = inception.POOL_DIM, inception.SPATIAL_DIM
  reference = read_statistics(sample.fid_reference, *sizes)
  params = load_inception(sample.fid_inception)
  ours = {"resize": sample.fid_resize, "inception": params_sha256(params)}
  reference.check_made_with(ours, sample.fid_reference)
  features = make_extractor(inception.InceptionV3(), sample.fid_resize)

  @functools.cache
  def on(mesh: Mesh) -> Any:
    return jax.device_put(params, sharding.replicated(mesh))

  def extract(images: jax.Array, mesh: Mesh) -> jax.Array:
    return features(on(mesh), images).pool3

  return reference.pool3, extract


def make_fid(
  config: Config,
  reference: Gaussian,
  extract: Callable[[jax.Array, Mesh], jax.Array],
  decode: Decode | None = None,
) -> Evaluate:
  """Makes the metric "fid" of a state.

  Image i has the noise of (train.seed, i) and the label i modulo the number of
  classes, so the metric depends on the parameters alone.

  Args:
    config: of a diffusion model; `sample.fid_images` images are sampled,
      `eval.batch_size` at a time, but at most 64 (or one for each shard).
    reference: distribution of the features of real images.
    extract: maps images [B, X, Y, 3] uint8 on a mesh to features [B, D].
    decode: latents to images; required by models of latents.

  Raises:
    ValueError: the decoder is missing, or images have neither 1 nor 3 channels.
  """
  model, _ = make_model(config)
  paint = make_image_sampler(model, config, decode)
  num = config.sample.fid_images
  most = min(config.eval.batch_size, _MOST_AT_ONCE)
  channels, classes = config.model.channels, config.model.num_classes
  if decode is None and channels not in (1, 3):
    raise ValueError(
      f"sample.fid_images={num} must be 0 for model.channels={channels}: the "
      "metric is of images with 1 or 3"
    )

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    seen, shards = None, sharding.batch_shards(mesh)
    size = max(most // shards, 1) * shards
    for start in interruptible(range(0, num, size)):
      index = np.arange(start, start + size, dtype=np.int32)
      batch = [sharding.put_batch(x, mesh) for x in (index, index % classes)]
      images = paint(params, config.train.seed, *batch)
      if images.shape[-1] == 1:
        images = images.repeat(3, -1)
      features = sharding.gather(extract(images, mesh))[: num - start]
      seen = moments(features, seen)
    return {"fid": frechet_distance(seen.gaussian(), reference)}

  return evaluate
