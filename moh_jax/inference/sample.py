"""Images from a diffusion checkpoint: a few, into memory."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import tqdm
from jax.sharding import Mesh

from moh_jax.config import Config, MeshConfig, check_command
from moh_jax.inference.restore import Restored
from moh_jax.models.generation import Decode, make_image_sampler
from moh_jax.runtime import sharding

Labels = Sequence[int | None]


class Sampler:
  """Samples images: image i has the noise and the label of index i."""

  def __init__(
    self,
    restored: Restored,
    *,
    labels: Labels = (),
    seed: int = 0,
    mesh: Mesh | None = None,
    decode: Decode | None = None,
    noise: np.ndarray | None = None,
    start: np.ndarray | None = None,
    strength: float = 1.0,
  ):
    """Prepares the program; it is compiled by the first batch.

    Args:
      restored: a diffusion model, its parameters on the mesh.
      labels: of the images in turn, repeated; None is the label that stands
        for none. Empty takes every class once.
      seed: of all noise.
      mesh: the devices that share each batch; None is the first one.
      decode: latents to images; required by models of latents.
      noise: [n, X, Y, channels] standard normal, what the images begin with in
        turn; None draws it from the seed.
      start: [n, X, Y, channels] scaled latents or pixels in [-1, 1], examples
        that the images begin from in turn (arXiv:2108.01073).
      strength: how much of a start image is drawn anew, above 0, at most 1:
        the part of the steps that is taken.

    Raises:
      ValueError: not a diffusion model, a label, the seed or the strength out
        of range, noise or examples of another shape, or the decoder is missing.
    """
    config = restored.config
    mesh = mesh or sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    check_request(config, labels, seed)
    classes = config.model.num_classes
    if not 0 < strength <= 1:
      raise ValueError(f"strength={strength} must be above 0, at most 1")
    if start is None and strength != 1:
      raise ValueError(f"strength={strength} is of `start`, which is missing")
    self._given = {
      name: _rows(name, value, config)
      for name, value in {"noise": noise, "start": start}.items()
      if value is not None
    }
    self._paint = make_image_sampler(
      restored.model, config, decode, strength=strength
    )
    known = [classes if label is None else label for label in labels]
    self.labels = np.asarray(known or range(classes), np.int32)
    names = restored.class_names or map(str, range(classes))
    self._names = (*names, "none")
    self._mesh, self._seed, self._params = mesh, seed, restored.params

  def batch(self, start: int, size: int) -> np.ndarray:
    """Images [size, X, Y, channels] uint8, from index `start` on."""
    index = np.arange(start, start + size, dtype=np.int32)
    index = sharding.pad_to_shards(index, self._mesh)
    labels = self.label(index)
    parts = [sharding.put_batch(part, self._mesh) for part in (index, labels)]
    given = {
      name: sharding.put_batch(rows[index % len(rows)], self._mesh)
      for name, rows in self._given.items()
    }
    images = self._paint(self._params, self._seed, *parts, **given)
    return sharding.gather(images, self._mesh)[:size]

  def label(self, index: np.ndarray) -> np.ndarray:
    """Labels of images by index, int32."""
    return self.labels[index % len(self.labels)]

  def name(self, label: int) -> str:
    """Name of a label: of its class, else its number; "none" for no label."""
    return self._names[label]


def _rows(name: str, rows: np.ndarray, config: Config) -> np.ndarray:
  rows = np.asarray(rows, np.float32)
  shape = config.model.input_shape
  if rows.ndim != 4 or rows.shape[1:] != shape or not len(rows):
    raise ValueError(
      f"{name} of shape {rows.shape} must be (n, {str(shape)[1:]} with n at "
      "least 1"
    )
  return rows


def check_request(config: Config, labels: Labels, seed: int) -> None:
  """Checks what `Sampler` is asked for, without a checkpoint's parameters.

  Raises:
    ValueError: not a diffusion model, or a label or the seed out of range.
  """
  check_command(config.model, "sample", "the checkpoint")
  classes = config.model.num_classes
  for label in labels:
    if label is None:
      if not config.model.label_dropout:
        raise ValueError(
          "label none: a model with model.label_dropout=0 has no such label"
        )
    elif not 0 <= label < classes:
      raise ValueError(f"label {label} must be in [0, {classes - 1}], or none")
  if not 0 <= seed < 2**31:
    raise ValueError(f"seed={seed} must be in [0, {2**31 - 1}]")


def sample_images(
  sampler: Sampler, num: int, batch_size: int, *, progress: bool = False
) -> np.ndarray:
  """Samples a few images into memory; returns [num, X, Y, channels] uint8."""
  starts = range(0, num, batch_size)
  batches = [
    sampler.batch(start, size)[: num - start]
    for start, size in full_batches(num, batch_size, starts, progress)
  ]
  return np.concatenate(batches)


def full_batches(
  num: int, size: int, starts: Sequence[int], progress: bool
) -> Iterator[tuple[int, int]]:
  """(start, size) of every wanted batch; all are full, so one program."""
  with tqdm.tqdm(
    total=num,
    initial=num - sum(min(size, num - start) for start in starts),
    unit="image",
    disable=not progress or jax.process_index() > 0 or None,
  ) as bar:
    for start in starts:
      yield start, size
      bar.update(min(size, num - start))
