"""Grain pipelines: this process's part of every global batch.

The training stream is one global sequence (shuffled anew each epoch, random
transforms keyed by the seed and the position), and global batch k is its
examples [k * B, (k + 1) * B), in order, whatever the number of processes:
process p of P reads the p-th of P parts. So the position of a run is one
number, the batches taken, and stays exact when the number of processes changes;
and what a loss draws for a row of the batch meets the same example.
"""

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import grain
import jax
import numpy as np

from moh_jax.config import Config, DataConfig, TextDataConfig
from moh_jax.data.images.recipes import eval_recipe, train_recipe
from moh_jax.data.images.sources import ImageSource

Batch = dict[str, np.ndarray]


class Source(Protocol):
  """Random access to examples, dicts of arrays."""

  def __len__(self) -> int:
    """Number of examples."""

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One example."""


def train_images(config: Config, source: ImageSource) -> grain.MapDataset:
  """The endless stream of training images, or latents.

  Args:
    config: the run.
    source: the training split.

  Returns:
    Examples {"image": [X, Y, channels] float32, "label": [] int32}.
  """
  dataset = grain.MapDataset.source(source).seed(config.train.seed)
  dataset = dataset.shuffle().repeat()
  for transform in train_recipe(config):
    if isinstance(transform, grain.transforms.RandomMap):
      dataset = dataset.random_map(transform)
    else:
      dataset = dataset.map(transform)
  return dataset


class TransformedSource:
  """Held-out images after their transforms, none of which is random."""

  def __init__(self, config: Config, source: ImageSource):
    """Wraps the held-out split of a run."""
    self._source, self._transforms = source, eval_recipe(config)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    element = self._source[index]
    for transform in self._transforms:
      element = transform.map(element)
    return element


class TrainBatches:
  """Endless training batches with an exact, storable position.

  Each batch holds b = batch size / processes examples.
  """

  def __init__(
    self,
    dataset: grain.MapDataset,
    data: DataConfig | TextDataConfig,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
  ):
    """Opens the stream at its beginning.

    Processes that share their part of the batch (`sharding.batch_slice`) pass
    the index of that part and the number of parts instead.

    Args:
      dataset: the endless training stream of examples.
      data: the section that says how it is read.
      process_index: this process; None asks JAX.
      process_count: all processes; None asks JAX.
    """
    index, count = _process(process_index, process_count)
    local = _local_batch("data.batch_size", data.batch_size, count)
    # Threads read examples, not whole batches: batch after iterating.
    options = _read_options(data, local)
    dataset = _Part(dataset, index, local, data.batch_size)
    self._iterator = iter(dataset.to_iter_dataset(options).batch(local))
    self._local_batch = local

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return next(self._iterator)

  @property
  def position(self) -> int:
    """Batches taken so far."""
    return self._iterator.get_state()["next_index"] // self._local_batch

  def seek(self, position: int) -> None:
    """Moves to before batch `position`, 0 the first."""
    self._iterator.set_state({"next_index": position * self._local_batch})


def eval_batches(
  config: Config,
  source: Source,
  *,
  process_index: int | None = None,
  process_count: int | None = None,
) -> Iterator[Batch]:
  """The held-out split, once, unshuffled; `eval.examples` of it at most.

  The last batch is filled up with zeros; "mask" [b] float32 is 0 there.

  Args:
    config: the run.
    source: the held-out examples, ready for the model.
    process_index: this process; None asks JAX.
    process_count: all processes; None asks JAX.

  Returns:
    Batches of the examples with "index" and "mask", equally many on every
    process; "index" [b] int32 is the example's place in the split.
  """
  index, count = _process(process_index, process_count)
  size = config.eval.batch_size
  local = _local_batch("eval.batch_size", size, count)
  examples = min(config.eval.examples or len(source), len(source))
  padded = -(-examples // size) * size

  @functools.cache
  def nothing() -> dict[str, Any]:
    return jax.tree.map(np.zeros_like, source[0])

  def load(position: int) -> dict[str, Any]:
    there = position < examples
    place = position * len(source) // examples if there else 0
    element = source[place] if there else nothing()
    return {**element, "index": np.int32(place), "mask": np.float32(there)}

  dataset = grain.MapDataset.range(padded)[index::count].map(load)
  options = _read_options(config.data, local)
  return iter(dataset.to_iter_dataset(options).batch(local))


class _Part(grain.MapDataset):
  """One process's part of every batch of a global sequence."""

  def __init__(
    self, parent: grain.MapDataset, part: int, local: int, batch: int
  ):
    super().__init__(parent)
    self._part, self._local, self._batch = part, local, batch

  def __len__(self) -> int:
    return len(self._parent) // self._batch * self._local

  def __getitem__(self, index: int) -> Any:
    step, row = divmod(index, self._local)
    return self._parent[step * self._batch + self._part * self._local + row]


def _read_options(
  data: DataConfig | TextDataConfig, local_batch: int
) -> grain.ReadOptions:
  return grain.ReadOptions(
    num_threads=data.num_threads,
    prefetch_buffer_size=data.prefetch * local_batch,
  )


def _process(index: int | None, count: int | None) -> tuple[int, int]:
  if index is None or count is None:
    return jax.process_index(), jax.process_count()
  return index, count


def _local_batch(name: str, size: int, processes: int) -> int:
  if size % processes:
    raise ValueError(
      f"{name}={size} must be a multiple of the {processes} processes"
    )
  return size // processes
