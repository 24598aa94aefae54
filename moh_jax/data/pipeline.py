"""Grain pipelines: each process reads its own rows of every global batch.

The training stream is one global sequence of examples: every epoch is shuffled
anew, and random transforms depend on the seed and the position alone. Global
batch k of size B is examples [k * B, (k + 1) * B) of it, in order; a process
reads the rows that its devices hold. So the position of a run is one number,
the count of batches read, which stays exact if the number of processes changes,
and each row of a global batch always holds the same example.
"""

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import absl.flags
import grain
import jax.tree
import numpy as np

from moh_jax.config import Config
from moh_jax.config.data import ExamplesConfig
from moh_jax.config.registry import get_source
from moh_jax.data import transforms
from moh_jax.data.sources import CheckedSource, is_latent

Batch = dict[str, np.ndarray]
# Operations on images hold Python's lock for a tenth (crop and flip) to a third
# (RandAugment too) of their time, so a process keeps 3 to 9 CPUs busy at most.
_CPUS_PER_WORKER, _MOST_WORKERS = 16, 8
# Processes exchange batches there; a container of Docker has 64 MB of it.
_SHARED_MEMORY = "/dev/shm"
_SHARED_BATCHES = 3  # of each: one is sent, one waits, one is used
_EPOCH_STEP = 256  # examples: the length of a repeated epoch is a multiple

# Random access to examples, which are dicts of arrays.
Source = grain.sources.RandomAccessDataSource[dict[str, Any]]


def train_images(config: Config, source: CheckedSource) -> grain.MapDataset:
  """Builds the endless stream of transformed training images (or latents).

  Args:
    config: config of the run.
    source: source of the training split.

  Returns:
    Examples {"image": [X, Y, channels], "label": [] int32}. Pixels are uint8,
    and `transforms.normalizer` makes float32 of them on the device; latents are
    float32.
  """
  recipe = transforms.train_transforms(config.data, config.model)
  if is_latent(config):
    recipe = _of_latents(config, transforms.RandomChange, "sample_latent")
  dataset = grain.MapDataset.source(source).seed(config.train.seed).shuffle()
  if config.data.repeats > 1:
    dataset = RepeatedImages(dataset, config.data.repeats)
  return dataset.repeat().apply(recipe)


def held_out_images(config: Config, source: CheckedSource) -> grain.MapDataset:
  """The held-out images of a run after their transforms; nothing is random.

  As in `train_images`, pixels are uint8. Diffusion models are always evaluated
  on the centre crop.
  """
  fit = transforms.eval_fit(config.data, config.model)
  if "diffusion" in config.sections:
    size = config.model.input_shape[:2]
    fit = functools.partial(transforms.center_crop, size=size)
  recipe: list = [transforms.Change(fit)]
  if is_latent(config):
    recipe = _of_latents(config, transforms.Change, "mean_latent")
  return grain.MapDataset.source(source).apply(recipe)


def _of_latents(config: Config, kind: type, name: str) -> list:
  """The transform of stored posteriors; random latents need none."""
  function, scaling = getattr(transforms, name), config.diffusion.scaling
  stored = "images" not in get_source(config.data).holds
  return [kind(functools.partial(function, scaling=scaling))] if stored else []


class RepeatedImages(grain.MapDataset):
  """Copies of each image one after the other (arXiv:1901.09335).

  An epoch is the beginning of a shuffled one, as long as that rounded down to a
  multiple of 256: the order over all processes, and the length, of the sampler
  of DeiT and timm.
  """

  def __init__(self, parent: grain.MapDataset, copies: int):
    """Repeats examples.

    Args:
      parent: shuffled examples; index i + k * len(parent) is example i of epoch
        k.
      copies: of each example.
    """
    super().__init__(parent)
    self._copies, images = copies, len(parent)
    self._length = images // _EPOCH_STEP * _EPOCH_STEP or images

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> Any:
    epoch, place = divmod(index, self._length)
    return self._parent[epoch * len(self._parent) + place // self._copies]


class TrainBatches:
  """Endless iterator over some rows of every training batch.

  Its position can be stored, and restored exactly.

  Attributes:
    examples: what this part reads, one after the other.
    position: number of batches read so far.
  """

  def __init__(
    self, dataset: grain.MapDataset, data: ExamplesConfig, rows: Sequence[int]
  ):
    """Starts at the first batch.

    Args:
      dataset: the endless stream of training examples.
      data: section `data` of the config.
      rows: which rows of every global batch to read, see
        `batches.batch_rows`.
    """
    self.examples = _BatchRows(dataset, rows, data.batch_size)
    self._local_batch, self._data = len(rows), data
    self._iterator: Iterator[Batch] | None = None
    self.position = 0

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if self._iterator is None:
      self._iterator = self._open()
    batch = next(self._iterator)
    self.position += 1
    return batch

  def seek(self, position: int) -> None:
    """Makes batch `position` the next one; 0 is the first."""
    self.close()
    self.position = position

  def close(self) -> None:
    """Ends the threads and processes that read."""
    iterator, self._iterator = self._iterator, None
    if hasattr(iterator, "close"):
      iterator.close()

  def _open(self) -> Iterator[Batch]:
    """The batches from `position` on."""
    data, local = self._data, self._local_batch
    examples = self.examples.slice(slice(self.position * local, None))
    workers = worker_count(data, examples, local)
    if not workers:
      # Threads read examples, not whole batches: batch after iterating.
      options = _read_options(data, local)
      return iter(examples.to_iter_dataset(options).batch(local))
    # Worker w makes batches w, w + workers, ...: whole ones, so that they hold
    # the examples that the batches of threads hold.
    flags = absl.flags.FLAGS
    if not flags.is_parsed():
      flags.mark_as_parsed()  # grain's processes read them
    batches = examples.batch(local).to_iter_dataset(_read_options(data, 1))
    options = grain.multiprocessing.MultiprocessingOptions(
      num_workers=workers, per_worker_buffer_size=data.prefetch
    )
    return iter(batches.mp_prefetch(options))


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
  chosen = eval_indices(config, len(source))
  examples = len(chosen)
  padded = -(-examples // size) * size
  padding = jax.tree.map(np.zeros_like, source[0]) if examples < padded else {}

  def load(position: int) -> dict[str, Any]:
    if position >= examples:
      return {**padding, "index": np.int32(0), "mask": np.float32(0)}
    index = int(chosen[position])
    return {**source[index], "index": np.int32(index), "mask": np.float32(1)}

  positions = grain.MapDataset.range(padded)
  dataset = _BatchRows(positions, rows, size).map(load)
  options = _read_options(config.data, len(rows))
  return iter(dataset.to_iter_dataset(options).batch(len(rows)))


def eval_indices(config: Config, size: int) -> np.ndarray:
  """The examples of a held-out split of `size` that `eval_batches` reads."""
  examples = min(config.eval.examples or size, size)
  return np.arange(examples) * size // max(examples, 1)


def worker_count(data: ExamplesConfig, examples: Any, local_batch: int) -> int:
  """Processes to make batches; 0 leaves it to threads of this process.

  Args:
    data: section `data` of the config. Unless it says how many, images get one
      for each 16 CPUs, as far as their batches fit in shared memory.
    examples: of the batches; the first one tells the bytes of all.
    local_batch: examples of a batch.
  """
  if data.workers is not None or data.reads == "text":
    return data.workers or 0
  usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))
  most = min(len(usable(0)) // _CPUS_PER_WORKER, _MOST_WORKERS)
  if most and os.path.isdir(_SHARED_MEMORY):
    arrays = map(np.asarray, jax.tree.leaves(examples[0]))
    needed = _SHARED_BATCHES * local_batch * sum(x.nbytes for x in arrays)
    most = min(most, shutil.disk_usage(_SHARED_MEMORY).free // needed)
  return most


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


def _read_options(data: ExamplesConfig, local_batch: int) -> grain.ReadOptions:
  buffer = data.prefetch * local_batch
  # More threads than examples ahead would wait; grain warns of them.
  return grain.ReadOptions(
    num_threads=min(data.num_threads, buffer), prefetch_buffer_size=buffer
  )
