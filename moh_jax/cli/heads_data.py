"""What `heads` measures: a model, on images by class or on its text."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moh_jax.config import apply_overrides
from moh_jax.data import sequences
from moh_jax.data.infer import data_at
from moh_jax.data.pipeline import held_out_images
from moh_jax.data.sources import make_source
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.probe import Probe, make_probe
from moh_jax.inference.restore import Restored, load_checkpoint_tokenizer
from moh_jax.models.registry import make_model
from moh_jax.runtime.batches import batch_rows, shard_batch
from moh_jax.training.task import held_out_batches, stream

_TEXT_BATCHES = 8
# Names of the examples' labels; makes the global batches, on the devices, from
# the first on; what the data are, for people.
_Data = tuple[tuple[str, ...], Callable[[], Iterable[Any]], str]


@dataclasses.dataclass(frozen=True)
class Opened:
  """A model, and examples with labels that its heads are measured on.

  Attributes:
    restored: the model.
    probe: of its family.
    tokenizer: of a language model that has one, or None.
    labels: names of the examples' labels.
    batches: makes the global batches, on the devices, from the first on.
    where: what the data are, for people.
  """

  restored: Restored
  probe: Probe
  tokenizer: Tokenizer | None
  labels: tuple[str, ...]
  batches: Callable[[], Iterable[Any]]
  where: str


def open_examples(options: Any, mesh: Mesh) -> Opened:
  """Opens --checkpoint and the data that its heads are measured on.

  Args:
    options: of `heads`.
    mesh: the devices.

  Raises:
    FileNotFoundError: there are no such data.
    ValueError: the data do not fit the model.
  """
  metadata, step = options.stored()
  # A family without a probe says so before its parameters are read.
  make_probe(make_model(metadata.config)[0], metadata.config)
  tokenizer = None
  if metadata.tokenizer_sha256:
    tokenizer = load_checkpoint_tokenizer(options.checkpoint, step)
  restored = options.restore(mesh=mesh)
  is_text = restored.config.model.READS_TEXT
  data = (_training_text if is_text else _images)(options, restored, mesh)
  probe = make_probe(restored.model, restored.config)
  return Opened(restored, probe, tokenizer, *data)


def _images(options: Any, restored: Restored, mesh: Mesh) -> _Data:
  size = options.batch_size
  config = apply_overrides(
    restored.config,
    "eval",
    batch_size=size,
    examples=(options.batches or 0) * size,
  )
  where = config.data.path or config.data.source
  if options.data:
    where = options.data
    config = apply_overrides(config, "data", **data_at(config, where))
  source = make_source(config, "val", restored.class_names)
  ready = held_out_images(config, source)
  batches = lambda: held_out_batches(config, ready, mesh)  # noqa: E731
  return source.class_names, batches, where


def _training_text(options: Any, restored: Restored, mesh: Mesh) -> _Data:
  size = options.batch_size
  # Nothing is accumulated here, so any batch will do.
  config = apply_overrides(restored.config, "optim", accumulation=1)
  if options.data:
    config = apply_overrides(config, "data", **data_at(config, options.data))
  config = apply_overrides(config, "data", batch_size=size)
  # The seed of the run's order does not matter here: with a fixed one, runs of
  # different seeds are compared on the same sequences.
  text = sequences.Text(config.data, config.model.vocab_size, "train")

  def batches() -> Iterable[Any]:
    count = options.batches or _TEXT_BATCHES
    taken = itertools.islice(stream(config, text.stream(0), mesh), count)
    rows = batch_rows(mesh, size).astype(np.int32)
    for number, batch in enumerate(taken):
      labels = {
        "label": np.zeros_like(rows),
        "index": rows + number * size,
        "mask": np.ones(len(rows), np.float32),
      }
      yield shard_batch({**batch, **labels}, mesh)

  where = options.data or "the run's training text"
  return ("training text",), batches, where
