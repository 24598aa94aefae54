"""What a family trains on: its model, inputs and loss."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.models.vit import ViT
from moh_jax.training import losses
from moh_jax.training.step import LossFn, Metrics


@dataclasses.dataclass(frozen=True)
class Task:
  """A family's training problem.

  Attributes:
    model: the Linen module.
    inputs: abstract positional arguments of the model, batch axis 1.
    loss_fn: (params, batch, rng) -> (loss, metrics).
  """

  model: nn.Module
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  loss_fn: LossFn


def make_model(config: Config) -> tuple[nn.Module, tuple]:
  """The configured model and its abstract inputs."""
  model = config.model
  shape = (1, *model.image_size, model.channels)
  return ViT(model), (jax.ShapeDtypeStruct(shape, jnp.float32),)


def make_task(config: Config) -> Task:
  """Builds the task of the configured family."""
  model, inputs = make_model(config)
  return Task(model, inputs, classification_loss(model, config))


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
