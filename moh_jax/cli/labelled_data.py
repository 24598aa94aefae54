"""Labelled examples that `heads` measures on: images by class, text by task."""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.data import sequences
from moh_jax.data.identity import Identity
from moh_jax.data.infer import data_at
from moh_jax.data.pipeline import held_out_images
from moh_jax.data.sequences import LabelledTexts
from moh_jax.data.sources import make_source
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.inference.restore import Restored
from moh_jax.runtime import sharding
from moh_jax.training.task import held_out_batches, stream

_TEXT_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class LabelledData:
  """Examples with labels.

  Attributes:
    names: of the labels.
    batches: makes the global batches, on the devices, from the first on.
    where: what the data are, for people.
    identity: tells the identity of the run's own data by source; {} of files
      of text.
  """

  names: tuple[str, ...]
  batches: Callable[[], Iterable[Any]]
  where: str
  identity: Callable[[], Mapping[str, Identity]]


def open_data(
  args: argparse.Namespace,
  restored: Restored,
  tokenizer: Tokenizer | None,
  mesh: Mesh,
) -> LabelledData:
  """Opens --data, or without it the run's own data.

  Args:
    args: with `data`, `field`, `batches` and `batch_size`.
    restored: the model.
    tokenizer: of a language model, None where it has none.
    mesh: the devices.

  Raises:
    FileNotFoundError: there are no such data.
    ValueError: the data do not fit the model.
  """
  config = restored.config
  # Nothing is accumulated here, so any batch will do.
  config = config_lib.apply_overrides(config, "optim", accumulation=1)
  size = args.batch_size
  config = config_lib.apply_overrides(
    config, "eval", batch_size=size, examples=(args.batches or 0) * size
  )
  if not config.model.READS_TEXT:
    return _images(args, config, restored, mesh)
  if args.data:
    return _texts(args, config, tokenizer, mesh)
  return _training_text(args, config, mesh)


def _images(
  args: argparse.Namespace,
  config: config_lib.Config,
  restored: Restored,
  mesh: Mesh,
) -> LabelledData:
  where = config.data.path or config.data.source
  if args.data:
    if len(args.data) > 1:
      raise ValueError(
        f"--data {' '.join(args.data)} must be one directory for a model of "
        f"images, not {len(args.data)}"
      )
    (where,) = args.data
    data = data_at(config, where)
    config = config_lib.apply_overrides(config, "data", **data)
  source = make_source(config, "val", restored.class_names)
  ready = held_out_images(config, source)
  return LabelledData(
    source.class_names,
    lambda: held_out_batches(config, ready, mesh),
    where,
    lambda: {config.data.source: source.identity()},
  )


def _texts(
  args: argparse.Namespace,
  config: config_lib.Config,
  tokenizer: Tokenizer | None,
  mesh: Mesh,
) -> LabelledData:
  if tokenizer is None:
    raise ValueError(
      f"--data {args.data[0]}: the checkpoint {args.checkpoint} has no "
      "tokenizer to read text with"
    )
  most = (args.batches or _TEXT_BATCHES) * args.batch_size
  length = config.data.sequence_length
  texts = LabelledTexts(args.data, args.field, tokenizer, length, most)
  config = config_lib.apply_overrides(config, "eval", examples=0)
  where = f"{len(texts.names)} text files"
  return LabelledData(
    texts.names, lambda: held_out_batches(config, texts, mesh), where, dict
  )


def _training_text(
  args: argparse.Namespace, config: config_lib.Config, mesh: Mesh
) -> LabelledData:
  size = args.batch_size
  config = config_lib.apply_overrides(config, "data", batch_size=size)
  vocabulary = config.model.vocab_size
  # The seed of the run's order does not matter here: with a fixed one, runs of
  # different seeds are compared on the same sequences.
  text = sequences.Text(config.data, vocabulary, "train").stream(0)

  def batches() -> Iterable[Any]:
    taken = itertools.islice(
      stream(config, text, mesh), args.batches or _TEXT_BATCHES
    )
    rows = sharding.batch_rows(mesh, size).astype(np.int32)
    for number, batch in enumerate(taken):
      labels = {
        "label": np.zeros_like(rows),
        "index": rows + number * size,
        "mask": np.ones(len(rows), np.float32),
      }
      yield sharding.shard_batch({**batch, **labels}, mesh)

  return LabelledData(
    ("training text",),
    batches,
    "the run's training text",
    lambda: sequences.Text(config.data, vocabulary, "train").identity(),
  )
