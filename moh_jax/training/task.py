"""Interface between a family and the training loop: its task."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import flax.linen as nn
import grain
import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config, get_family, imported
from moh_jax.data import pipeline
from moh_jax.data.files import Identity
from moh_jax.data.sources import make_source
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.data.transforms import normalizer
from moh_jax.evaluation.metrics import EvalStep, mean_metrics
from moh_jax.models.generation import Decode
from moh_jax.models.registry import make_model
from moh_jax.runtime.batches import batch_rows, shard_batch
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.step import LossFn, Objective

_LOG = logging.getLogger(__name__)
Evaluate = Callable[[Any, Mesh], dict[str, float]]
Preview = Callable[[Any, Mesh], np.ndarray]


class TaskBuilder(Protocol):
  """Builds what a family trains on and is scored by."""

  def make_objective(self, config: Config) -> Objective:
    """Builds the network and its loss; no data are read.

    Args:
      config: of the run.
    """

  def make_task(self, config: Config, decode: Decode | None = None) -> "Task":
    """Opens the data and builds the training task.

    Args:
      config: of the run.
      decode: latents to images, for previews of latent diffusion.

    Raises:
      FileNotFoundError: data is missing.
      ValueError: the data does not fit the model.
    """

  def make_evaluate(
    self, model: nn.Module, config: Config, trained: Metadata
  ) -> Evaluate:
    """Opens the held-out data alone and prepares its evaluation.

    Args:
      model: the network.
      config: of the run, whose data may be other than that of the training.
      trained: class names and tokenizer of the training, empty if unknown.
    """


def task_builder(config: Config) -> TaskBuilder:
  """What builds the task of a run's family."""
  return imported(get_family(config.model.family).task)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(Objective):
  """Everything that the training loop needs to know of a family and its data.

  Attributes, beside those of the objective:
    batches: (mesh) -> this process's training batches, from the first on.
    evaluate: (params, mesh) -> metrics of the whole held-out split; empty where
      there is none.
    class_names: names of the labels, empty where there are none.
    preview: (params, mesh) -> image [rows, columns, channels] uint8 that shows
      the progress of the run, or None.
    preview_every: steps between previews.
    tokenizer: tokenizer of the text that the model reads, or None.
    shown: the family's own metrics that the progress shows, after the loss.
    identity: what identifies the training data, by source. A run is not
      continued with other data.
    encoder_sha256: of the autoencoder that made latents; "" where none did.
  """

  batches: Callable[[Mesh], pipeline.TrainBatches]
  evaluate: Evaluate
  class_names: tuple[str, ...]
  preview: Preview | None = None
  preview_every: int = 0
  tokenizer: Tokenizer | None = None
  shown: tuple[str, ...] = ()
  identity: Mapping[str, Identity] = dataclasses.field(default_factory=dict)
  encoder_sha256: str = ""

  def metadata(self, config: Config) -> Metadata:
    """What the checkpoints of a run hold beside its arrays."""
    sha256 = self.tokenizer.sha256 if self.tokenizer else ""
    return Metadata(config, self.class_names, sha256, self.encoder_sha256)


def image_objective(
  config: Config,
  make_loss: Callable[[nn.Module, Config], LossFn],
) -> Objective:
  """The objective of a network that reads labelled images or latents.

  Args:
    config: of the run.
    make_loss: (network, config) -> its loss on float32 pixels, which may see
      the examples of one device alone.
  """
  model, inputs = make_model(config)
  loss_fn, normalize = make_loss(model, config), normalizer(config.data)
  # Pixels cross to the devices as bytes.
  dtype = "float32" if config.data.mean is None else "uint8"
  return Objective(
    model=model,
    inputs=inputs,
    example={
      "image": jax.ShapeDtypeStruct(config.model.input_shape, dtype),
      "label": jax.ShapeDtypeStruct((), "int32"),
    },
    loss_fn=lambda params, batch, *args: loss_fn(
      params, normalize(batch), *args
    ),
    unit="images",
    units_per_step=config.data.batch_size,
    by_device=True,
  )


def image_task(
  config: Config,
  objective: Objective,
  make_evaluate: Callable[[nn.Module, Config, Metadata], Evaluate],
  **fields: Any,
) -> Task:
  """Opens the images or latents of an objective; their evaluation with it.

  Args:
    config: of the run.
    objective: see `image_objective`.
    make_evaluate: see `TaskBuilder`.
    **fields: further ones of `Task`.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  train = make_source(config, "train")
  trained = Metadata(config, train.class_names)
  dataset = pipeline.train_images(config, train)
  return Task(
    **vars(objective),
    batches=lambda mesh: stream(config, dataset, mesh, len(train)),
    evaluate=make_evaluate(objective.model, config, trained),
    class_names=train.class_names,
    identity={"train": train.identity()},
    encoder_sha256=getattr(train, "encoder_sha256", ""),
    **fields,
  )


def image_evaluation(
  config: Config, trained: Metadata, eval_step: EvalStep
) -> Evaluate:
  """Opens the held-out images or latents, to take the means of metrics.

  Args:
    config: of the run.
    trained: its class names must be those of the held-out split.
    eval_step: sums of the metrics over a batch.
  """
  source = make_source(config, "val", trained.class_names)
  ready = pipeline.held_out_images(config, source)

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    batches = held_out_batches(config, ready, mesh)
    return mean_metrics(eval_step, params, batches)

  return evaluate


def stream(
  config: Config, dataset: grain.MapDataset, mesh: Mesh, examples: int = 0
) -> pipeline.TrainBatches:
  """The training batches that this process reads for a mesh.

  With the number of training examples it says how often a run reads them.
  """
  if examples:
    batch, steps = config.data.batch_size, config.train.steps
    passes = steps * batch / examples
    _LOG.log(
      logging.WARNING if passes > steps else logging.INFO,
      "steps: %d batches of %d examples pass over the %d training examples "
      "%.3g times%s",
      *(steps, batch, examples, passes),
      ", some in one batch" * (passes > steps),
    )
  rows = batch_rows(mesh, config.data.batch_size)
  return pipeline.TrainBatches(dataset, config.data, rows)


def held_out_batches(
  config: Config, source: pipeline.Source, mesh: Mesh
) -> Iterator[Any]:
  """Global batches of the held-out examples, as arrays on the devices."""
  if not len(source):
    raise ValueError("the split to evaluate is empty")
  rows = batch_rows(mesh, config.eval.batch_size)
  batches = pipeline.eval_batches(config, source, rows)
  normalize = normalizer(config.data)
  return (normalize(shard_batch(batch, mesh)) for batch in batches)
