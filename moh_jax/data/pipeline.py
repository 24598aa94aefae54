"""Grain pipelines: each process reads its own rows of every global batch.

The training stream is one global sequence of examples: every epoch is shuffled
anew, and random transforms depend on the seed and the position alone. Global
batch k of size B is examples [k * B, (k + 1) * B) of it, in order; a process
reads the rows that its devices hold. So the position of a run is one number,
the count of batches read, which stays exact if the number of processes changes,
and each row of a global batch always holds the same example.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax.tree
import numpy as np

from moh_jax.config import Config, DataConfig, TextDataConfig
from moh_jax.data.images.recipes import eval_recipe, train_recipe
from moh_jax.data.images.sources import ImageSource

Batch = dict[str, np.ndarray]


# Random access to examples, which are dicts of arrays.
Source = grain.sources.RandomAccessDataSource[dict[str, Any]]


def train_images(config: Config, source: ImageSource) -> grain.MapDataset:
  """Builds the endless stream of transformed training images (or latents).

  Args:
    config: config of the run.
    source: source of the training split.

  Returns:
    Examples {"image": [X, Y, channels] float32, "label": [] int32}.
  """
  dataset = grain.MapDataset.source(source).seed(config.train.seed)
  return dataset.shuffle().repeat().apply(train_recipe(config))


def held_out_images(config: Config, source: ImageSource) -> grain.MapDataset:
  """The held-out images of a run after their transforms; nothing is random."""
  return grain.MapDataset.source(source).apply(eval_recipe(config))


class TrainBatches:
  """Endless iterator over some rows of every training batch.

  Its position can be stored, and restored exactly.
  """

  def __init__(
    self,
    dataset: grain.MapDataset,
    data: DataConfig | TextDataConfig,
    rows: Sequence[int],
  ):
    """Starts at the first batch.

    Args:
      dataset: the endless stream of training examples.
      data: section `data` of the config.
      rows: which rows of every global batch to read, see
        `sharding.batch_rows`.
    """
    # Threads read examples, not whole batches: batch after iterating.
    options = _read_options(data, len(rows))
    dataset = _BatchRows(dataset, rows, data.batch_size)
    self._iterator = iter(dataset.to_iter_dataset(options).batch(len(rows)))
    self._local_batch = len(rows)

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return next(self._iterator)

  @property
  def position(self) -> int:
    """Number of batches read so far."""
    return self._iterator.get_state()["next_index"] // self._local_batch

  def seek(self, position: int) -> None:
    """Makes batch `position` the next one; 0 is the first."""
    self._iterator.set_state({"next_index": position * self._local_batch})


def eval_batches(
  config: Config, source: Source, rows: Sequence[int]
) -> Iterator[Batch]:
  """Iterates once over the held-out split, unshuffled.

  With `eval.examples` below the size of the split, that many examples at equal
  distances are read. The last batch is padded with zeros.

  Args:
    config: config of the run.
    source: source of the held-out examples, ready for the model.
    rows: which rows of every global batch to read.

  Returns:
    Iterator over those rows of all global batches. To the arrays of the
    examples come "index" [b] int32, the position in the split, and "mask" [b]
    float32, 1 for examples and 0 for padding.
  """
  size = config.eval.batch_size
  examples = min(config.eval.examples or len(source), len(source))
  padded = -(-examples // size) * size

  @functools.cache
  def padding() -> dict[str, Any]:
    return jax.tree.map(np.zeros_like, source[0])

  def load(position: int) -> dict[str, Any]:
    if position >= examples:
      return {**padding(), "index": np.int32(0), "mask": np.float32(0)}
    index = position * len(source) // examples
    return {**source[index], "index": np.int32(index), "mask": np.float32(1)}

  positions = grain.MapDataset.range(padded)
  dataset = _BatchRows(positions, rows, size).map(load)
  options = _read_options(config.data, len(rows))
  return iter(dataset.to_iter_dataset(options).batch(len(rows)))


class _BatchRows(grain.MapDataset):
  """Some rows of every batch of a global sequence of examples."""

  def __init__(self, parent: grain.MapDataset, rows: Sequence[int], batch: int):
    super().__init__(parent)
    self._rows, self._batch = [int(row) for row in rows], batch

  def __len__(self) -> int:
    return len(self._parent) // self._batch * len(self._rows)

  def __getitem__(self, index: int) -> Any:
    step, row = divmod(index, len(self._rows))
    return self._parent[step * self._batch + self._rows[row]]


def _read_options(
  data: DataConfig | TextDataConfig, local_batch: int
) -> grain.ReadOptions:
  return grain.ReadOptions(
    num_threads=data.num_threads,
    prefetch_buffer_size=data.prefetch * local_batch,
  )
