"""What the training loop needs of a family."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import flax.linen as nn
import grain
import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.data.images.sources import check_class_names, make_source
from moh_jax.data.pipeline import (
  Source,
  TrainBatches,
  TransformedSource,
  eval_batches,
)
from moh_jax.data.text.tokenizers import Tokenizer
from moh_jax.evaluation.means import EvalStep, mean_metrics
from moh_jax.models.generation import Decode
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.step import LossFn

Evaluate = Callable[[Any, Mesh], dict[str, float]]
Preview = Callable[[Any, Mesh], np.ndarray]


class TaskBuilder(Protocol):
  """Builds what a family trains on and is scored by."""

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


@dataclasses.dataclass(frozen=True)
class Task:
  """A family's training problem: all that the loop does not know.

  Attributes:
    model: the Linen module.
    inputs: abstract positional arguments of the model, batch axis 1.
    loss_fn: (params, batch, rng, step) -> (loss, metrics).
    batches: (mesh) -> this process's training stream, at its beginning.
    evaluate: (params, mesh) -> metrics of the whole held-out split; empty where
      there is none.
    class_names: names of the labels, empty where there are none.
    unit: what throughput counts.
    units_per_step: how many of them a step takes.
    preview: (params, mesh) -> a picture [rows, columns, channels] uint8 to
      watch the run by, or None.
    preview_every: steps between previews.
    tokenizer: of the text that the model reads, or None.
    drawn: (examples) -> metrics of the first so many of the training stream, to
      log; or None.
    shown: the family's own metrics that the progress shows, after the loss.
  """

  model: nn.Module
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  loss_fn: LossFn
  batches: Callable[[Mesh], TrainBatches]
  evaluate: Evaluate
  class_names: tuple[str, ...]
  unit: str
  units_per_step: int
  preview: Preview | None = None
  preview_every: int = 0
  tokenizer: Tokenizer | None = None
  drawn: Callable[[int], dict[str, float]] | None = None
  shown: tuple[str, ...] = ()


def stream(
  config: Config, dataset: grain.MapDataset, mesh: Mesh
) -> TrainBatches:
  """The training batches that this process reads for a mesh."""
  return TrainBatches(dataset, config.data, *sharding.batch_slice(mesh))


def held_out_batches(
  config: Config, source: Source, mesh: Mesh
) -> Iterator[Any]:
  """Global batches of the held-out examples, as arrays on the devices."""
  batches = eval_batches(config, source, *sharding.batch_slice(mesh))
  return (sharding.shard_batch(batch, mesh) for batch in batches)


def evaluate_held_out(
  config: Config, class_names: tuple[str, ...], eval_step: EvalStep
) -> Evaluate:
  """Opens the held-out split and prepares its evaluation.

  Args:
    config: the run.
    class_names: of the labels that the model was trained with.
    eval_step: sums over one batch.

  Raises:
    FileNotFoundError: there is no held-out split.
    ValueError: its classes are others.
  """
  source = make_source(config, "val")
  if config.data.source != "fake":
    check_class_names(class_names, source.class_names, "the held-out split")

  ready = TransformedSource(config, source)

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    batches = held_out_batches(config, ready, mesh)
    return mean_metrics(eval_step, params, batches)

  return evaluate
