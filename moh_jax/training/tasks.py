"""What a family trains on: its model, data, loss and evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.data.pipeline import TrainBatches, eval_batches
from moh_jax.data.sources import check_class_names, make_source
from moh_jax.evaluation import accuracy
from moh_jax.models.vit import ViT
from moh_jax.training import losses, sharding
from moh_jax.training.step import LossFn, Metrics


@dataclasses.dataclass(frozen=True)
class Task:
  """A family's training problem: all that the loop does not know.

  Attributes:
    model: the Linen module.
    inputs: abstract positional arguments of the model, batch axis 1.
    loss_fn: (params, batch, rng) -> (loss, metrics).
    batches: (mesh) -> this process's training stream, at its beginning.
    evaluate: (params, mesh) -> figures on the whole held-out split.
    class_names: names of the outputs, empty where there are none.
    unit: what throughput counts.
    units_per_step: how many of them a step takes.
  """

  model: nn.Module
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  loss_fn: LossFn
  batches: Callable[[Mesh], TrainBatches]
  evaluate: Callable[[Any, Mesh], dict[str, float]]
  class_names: tuple[str, ...]
  unit: str
  units_per_step: int


def make_model(config: Config) -> tuple[nn.Module, tuple]:
  """The configured model and its abstract inputs."""
  model = config.model
  shape = (1, *model.image_size, model.channels)
  return ViT(model), (jax.ShapeDtypeStruct(shape, jnp.float32),)


def make_task(config: Config) -> Task:
  """Builds the task of the configured family and opens its data.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  train, held_out = (
    make_source(config.data, config.model, split) for split in ("train", "val")
  )
  check_class_names(
    train.class_names, held_out.class_names, "the held-out split"
  )
  model, inputs = make_model(config)
  eval_step = accuracy.make_eval_step(model)

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    index, parts = sharding.batch_slice(mesh)
    batches = eval_batches(
      config, held_out, process_index=index, process_count=parts
    )
    batches = (sharding.shard_batch(batch, mesh) for batch in batches)
    return accuracy.evaluate(eval_step, params, batches)

  def open_batches(mesh: Mesh) -> TrainBatches:
    index, parts = sharding.batch_slice(mesh)
    return TrainBatches(config, train, process_index=index, process_count=parts)

  return Task(
    model=model,
    inputs=inputs,
    loss_fn=classification_loss(model, config),
    batches=open_batches,
    evaluate=evaluate,
    class_names=train.class_names,
    unit="images",
    units_per_step=config.data.batch_size,
  )


def classification_loss(model: nn.Module, config: Config) -> LossFn:
  """Cross-entropy of an image classifier plus the weighted balance loss.

  Args:
    model: maps images to (logits, aux).
    config: the run; its `train` section says how targets are made.

  Returns:
    The loss function; its metrics log the task loss and the balance loss apart.
  """
  train = config.train

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    mix_rng, dropout_rng = jax.random.split(rng)
    labels = batch["label"]
    targets = losses.class_targets(
      labels, config.model.num_classes, train.label_smoothing
    )
    images, targets = losses.mix_images(mix_rng, batch["image"], targets, train)
    logits, aux = model.apply(
      {"params": params}, images, train=True, rngs={"dropout": dropout_rng}
    )
    task_loss = losses.soft_cross_entropy(logits, targets).mean()
    loss = task_loss + train.balance_weight * aux.balance_loss
    correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return loss, {
      "loss": loss,
      "task_loss": task_loss,
      "balance_loss": aux.balance_loss,
      "accuracy": correct.mean(),
      "activated_share": aux.activated_share,
    }

  return loss_fn
