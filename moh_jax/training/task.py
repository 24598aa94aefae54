"""What the training loop needs of a family."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.data.pipeline import TrainBatches, eval_batches
from moh_jax.data.sources import (
  ImageSource,
  check_class_names,
  make_source,
)
from moh_jax.evaluation.means import EvalStep, mean_figures
from moh_jax.training import sharding
from moh_jax.training.step import LossFn

Evaluate = Callable[[Any, Mesh], dict[str, float]]
Preview = Callable[[Any, Mesh], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
  """A family's training problem: all that the loop does not know.

  Attributes:
    model: the Linen module.
    inputs: abstract positional arguments of the model, batch axis 1.
    loss_fn: (params, batch, rng) -> (loss, metrics).
    batches: (mesh) -> this process's training stream, at its beginning.
    evaluate: (params, mesh) -> figures on the whole held-out split; empty where
      there is none.
    class_names: names of the labels, empty where there are none.
    unit: what throughput counts.
    units_per_step: how many of them a step takes.
    preview: (params, mesh) -> a picture [rows, columns, channels] uint8 to
      watch the run by, or None.
    preview_every: steps between previews.
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


def stream(config: Config, source: ImageSource, mesh: Mesh) -> TrainBatches:
  """This process's training batches on a mesh."""
  index, parts = sharding.batch_slice(mesh)
  return TrainBatches(config, source, process_index=index, process_count=parts)


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

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    index, parts = sharding.batch_slice(mesh)
    batches = eval_batches(
      config, source, process_index=index, process_count=parts
    )
    batches = (sharding.shard_batch(batch, mesh) for batch in batches)
    return mean_figures(eval_step, params, batches)

  return evaluate
