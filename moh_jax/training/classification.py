"""Image classification: the task of MoH-ViT."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.data.pipeline import held_out_images, train_images
from moh_jax.data.sources import ImageSource, make_source
from moh_jax.evaluation import accuracy, predictions
from moh_jax.evaluation.predictions import Predict
from moh_jax.layers.partitioning import axes_of
from moh_jax.models.generation import Decode
from moh_jax.models.registry import make_model
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import losses
from moh_jax.training.step import LossFn, Metrics, add_balance_loss
from moh_jax.training.task import (
  Evaluate,
  Objective,
  Task,
  evaluate_held_out,
  held_out_batches,
  image_objective,
  stream,
)


def make_task(config: Config, decode: Decode | None = None) -> Task:
  """Opens the data and builds the task.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  del decode  # previews are for models that make images
  train = make_source(config, "train")
  objective = make_objective(config)
  metadata = Metadata(config, train.class_names)
  return Task(
    **vars(objective),
    batches=lambda mesh: stream(config, train_images(config, train), mesh),
    evaluate=make_evaluate(objective.model, config, metadata),
    class_names=train.class_names,
    shown=("accuracy",),
    identity={"train": train.identity()},
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
    model: maps images to (logits, aux).
    config: the run.
    trained: its class names must be those of the held-out split.
  """
  return evaluate_held_out(
    config, trained.class_names, accuracy.make_eval_step(model)
  )


def make_predict(
  model: nn.Module, config: Config, trained: Metadata
) -> tuple[ImageSource, Predict]:
  """Opens the held-out split and prepares its predictions.

  Args:
    model: maps images to (logits, aux).
    config: the run.
    trained: its class names are the labels.

  Returns:
    The split, and what predicts it.
  """
  source = make_source(config, "val", trained.class_names)
  step = predictions.predict_step(model)
  ready = held_out_images(config, source)

  def predict(params: Any, mesh: Mesh) -> predictions.Predictions:
    batches = held_out_batches(config, ready, mesh)
    return predictions.predict_all(step, params, batches, mesh)

  return source, predict


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Cross-entropy of an image classifier plus the weighted balance loss.

  Args:
    model: maps images to (logits, aux).
    config: the run; its section `classifier` says how targets are made.

  Returns:
    The loss function; its metrics log the task loss and the balance loss apart.
  """
  classifier, train = config.classifier, config.train

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del step
    mix_rng, dropout_rng = jax.random.split(rng)
    labels = batch["label"]
    targets = losses.class_targets(
      labels, config.model.num_classes, classifier.label_smoothing
    )
    # Between slices only gradients should pass, so images stay on their device.
    apart = config.mesh.dcn_data > 1
    images, targets = losses.mix_images(
      mix_rng,
      batch["image"],
      targets,
      classifier,
      math.prod(axes_of("batch", len(labels)).values()) if apart else 1,
    )
    logits, aux = model.apply(
      {"params": params}, images, train=True, rngs={"dropout": dropout_rng}
    )
    task_loss = losses.soft_cross_entropy(logits, targets).mean()
    correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return add_balance_loss(
      task_loss, aux, train.balance_weight, accuracy=correct.mean()
    )

  return loss_fn
