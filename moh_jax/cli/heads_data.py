"""What `heads` measures: models, on images by class or on their text."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config, apply_overrides
from moh_jax.data import sequences
from moh_jax.data.identity import Identity, differences
from moh_jax.data.infer import data_at
from moh_jax.data.pipeline import held_out_images
from moh_jax.data.sources import make_source
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.probe import Probe, make_probe
from moh_jax.inference.restore import Restored, load_checkpoint_tokenizer
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.training.task import held_out_batches, stream

_TEXT_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Opened:
  """A checkpoint, and examples with labels that its heads are measured on.

  Attributes:
    name: its directory and step.
    restored: the model.
    probe: of its family.
    tokenizer: of a language model that has one, or None.
    labels: names of the examples' labels.
    batches: makes the global batches, on the devices, from the first on.
    where: what the data are, for people.
    identity: tells the identity of the run's own data by source.
  """

  name: str
  restored: Restored
  probe: Probe
  tokenizer: Tokenizer | None
  labels: tuple[str, ...]
  batches: Callable[[], Iterable[Any]]
  where: str
  identity: Callable[[], Mapping[str, Identity]]


# The last four of `Opened`.
_Data = tuple[tuple[str, ...], Callable, str, Callable]


def open_both(options: Any, mesh: Mesh) -> list[Opened]:
  """Opens --checkpoint, and --against with the same data if it is given.

  Args:
    options: of `heads`.
    mesh: the devices.

  Raises:
    FileNotFoundError: there are no such data.
    ValueError: the data do not fit the model; or --against is the same
      checkpoint, or was trained on other data and there is no --data.
  """
  ours = _open(options, mesh)
  if not options.against:
    return [ours]
  other = {"checkpoint": options.against, "step": "newest", "top_k": None}
  theirs = _open(dataclasses.replace(options, **other), mesh)
  lines = []
  if theirs.name == ours.name:
    lines = [f"must be another checkpoint than {ours.name}"]
  elif not options.data:
    found = differences(theirs.identity(), ours.identity())
    own = f"its own data are not those of {options.checkpoint}"
    lines = found and [f"{own}, give --data for both", *found]
  if lines:
    raise ValueError(f"--against {options.against}: {'; '.join(lines)}")
  return [ours, theirs]


def _open(options: Any, mesh: Mesh) -> Opened:
  """Opens --checkpoint and the data that its heads are measured on."""
  metadata, step = options.stored()
  # A family without a probe says so before its parameters are read.
  make_probe(make_model(metadata.config)[0], metadata.config)
  tokenizer = None
  if metadata.tokenizer_sha256:
    tokenizer = load_checkpoint_tokenizer(options.checkpoint, step)
  restored = options.restore(mesh=mesh)
  size = options.batch_size
  # Nothing is accumulated here, so any batch will do.
  config = apply_overrides(restored.config, "optim", accumulation=1)
  config = apply_overrides(
    config, "eval", batch_size=size, examples=(options.batches or 0) * size
  )
  if not config.model.READS_TEXT:
    data = _images(options, config, restored.class_names, mesh)
  elif options.data:
    options.fail("data", "is for models of images")
  else:
    data = _training_text(options, config, mesh)
  probe = make_probe(restored.model, restored.config)
  name = f"{options.checkpoint}, step {step}"
  return Opened(name, restored, probe, tokenizer, *data)


def _images(
  options: Any, config: Config, class_names: Sequence[str], mesh: Mesh
) -> _Data:
  where = config.data.path or config.data.source
  if options.data:
    if len(options.data) > 1:
      options.fail("data", "must be one directory for a model of images")
    (where,) = options.data
    config = apply_overrides(config, "data", **data_at(config, where))
  source = make_source(config, "val", class_names)
  ready = held_out_images(config, source)
  return (
    source.class_names,
    lambda: held_out_batches(config, ready, mesh),
    where,
    lambda: {config.data.source: source.identity()},
  )


def _training_text(options: Any, config: Config, mesh: Mesh) -> _Data:
  size = options.batch_size
  config = apply_overrides(config, "data", batch_size=size)
  # The seed of the run's order does not matter here: with a fixed one, runs of
  # different seeds are compared on the same sequences.
  text = sequences.Text(config.data, config.model.vocab_size, "train")

  def batches() -> Iterable[Any]:
    count = options.batches or _TEXT_BATCHES
    taken = itertools.islice(stream(config, text.stream(0), mesh), count)
    rows = sharding.batch_rows(mesh, size).astype(np.int32)
    for number, batch in enumerate(taken):
      labels = {
        "label": np.zeros_like(rows),
        "index": rows + number * size,
        "mask": np.ones(len(rows), np.float32),
      }
      yield sharding.shard_batch({**batch, **labels}, mesh)

  where = "the run's training text"
  return (("training text",), batches, where, text.identity)
