"""Images from a diffusion checkpoint: a few into memory, many into files."""

import json
import os
import pathlib
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from moh_jax.config import Config, MeshConfig, check_command
from moh_jax.data.decode import to_picture
from moh_jax.inference.restore import Restored
from moh_jax.models.generation import Decode, image_grid, make_image_sampler
from moh_jax.runtime.batches import gather, pad_to_shards, put_batch
from moh_jax.runtime.files import inside, replacing, same_settings, write_whole
from moh_jax.runtime.mesh import make_mesh
from moh_jax.runtime.processes import ask_first_process

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
  ):
    """Prepares the program; it is compiled by the first batch.

    Args:
      restored: a diffusion model, its parameters on the mesh.
      labels: of the images in turn, repeated; None is the label of no
        class. Empty takes every class once.
      seed: of all noise, in [0, 2**31 - 1].
      mesh: the devices that share each batch; None is the first one.
      decode: latents to images; required by models of latents.

    Raises:
      ValueError: not a diffusion model, a label out of range, or the decoder
        is missing.
    """
    config = restored.config
    mesh = mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    check_request(config, labels)
    classes = config.model.num_classes
    self._paint = make_image_sampler(restored.model, config, decode)
    known = [classes if label is None else label for label in labels]
    self.labels = np.asarray(known or range(classes), np.int32)
    names = (*(restored.class_names or map(str, range(classes))), "none")
    self._names = tuple(
      name if names.count(name) == 1 else f"{name}-{label}"
      for label, name in enumerate(names)
    )
    self._mesh, self._seed, self._params = mesh, seed, restored.params

  def batch(self, start: int, size: int) -> np.ndarray:
    """Images [size, X, Y, channels] uint8, from index `start` on."""
    index = np.arange(start, start + size, dtype=np.int32)
    index = pad_to_shards(index, self._mesh)
    labels = self.label(index)
    parts = [put_batch(part, self._mesh) for part in (index, labels)]
    images = self._paint(self._params, self._seed, *parts)
    return gather(images)[:size]

  def label(self, index: np.ndarray) -> np.ndarray:
    """Labels of images by index, int32."""
    return self.labels[index % len(self.labels)]

  def name(self, label: int) -> str:
    """Name of a label: of its class, else its number; "none" for no label.

    Where several classes have one name, the number follows it.
    """
    return self._names[label]


def check_request(config: Config, labels: Labels) -> None:
  """Checks what `Sampler` is asked for, without a checkpoint's parameters.

  Raises:
    ValueError: not a diffusion model, or a label out of range.
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


def sample_images(sampler: Sampler, num: int, batch_size: int) -> np.ndarray:
  """Samples a few images into memory; returns [num, X, Y, channels] uint8."""
  batches = _batches(sampler, num, batch_size, range(0, num, batch_size))
  return np.concatenate([images for _, images in batches])


def _batches(
  sampler: Sampler, num: int, size: int, starts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
  """Start and images of every wanted batch of `num` images in all.

  All are sampled full, so that there is one program.
  """
  sizes = {start: min(size, num - start) for start in starts}
  with tqdm.tqdm(
    total=num,
    initial=num - sum(sizes.values()),
    unit="image",
    disable=jax.process_index() > 0 or None,
  ) as bar:
    for start, count in sizes.items():
      yield start, sampler.batch(start, size)[:count]
      bar.update(count)


def sample_files(
  sampler: Sampler,
  num: int,
  out: str | os.PathLike,
  *,
  batch_size: int,
  settings: dict[str, Any],
) -> int:
  """Samples many images into the npz file of ADM's evaluator, or into PNGs.

  A killed call continues with the batches that are not all there. For an npz
  file they wait in OUT.parts; the file appears when it is whole, with "arr_0"
  [num, X, Y, channels] uint8 and the labels "arr_1" [num] int32. PNGs are
  OUT/LABEL/NUMBER.png, see `Sampler.name`. OUT.settings.json, or settings.json
  in the folder, says what they were made with.

  Args:
    sampler: which images.
    num: images.
    out: .npz file to write, or folder to write into.
    batch_size: images per batch and part.
    settings: what the images depend on, as JSON values; a later call must have
      the same.

  Returns:
    The number of images sampled by this call; the others were there.

  Raises:
    ValueError: there are images of other settings.
    OSError: a file cannot be written; those before it are whole.
  """
  out, starts = pathlib.Path(out), range(0, num, batch_size)
  labels = sampler.label(np.arange(num, dtype=np.int32))
  joined = out.suffix == ".npz"
  settings = {**settings, "num": num}
  if joined:
    settings["batch_size"] = batch_size
    folder = out.with_name(f"{out.name}.parts")
    stated = out.with_name(f"{out.name}.settings.json")
    files = [[folder / f"{start:09d}.npy"] for start in starts]
  else:
    folder, stated = out, out / "settings.json"
    pictures = [
      # A name of several words, "cup/mug" say, is one folder.
      inside(out, sampler.name(label).replace("/", "%2F"), "class name")
      / f"{i:06d}.png"
      for i, label in enumerate(labels)
    ]
    files = [pictures[start : start + batch_size] for start in starts]

  def find_missing() -> list[bool]:
    if not same_settings(stated, settings, f"{out} holds samples"):
      if joined and out.exists():
        raise ValueError(
          f"{out} exists, and no {stated.name} beside it says what it was made "
          "with; choose another --out"
        )
      write_whole(stated, json.dumps(settings, indent=2).encode())
    folder.mkdir(exist_ok=True)
    done = joined and out.exists()
    return [not done and not all(f.exists() for f in some) for some in files]

  flags = ask_first_process(find_missing, len(files))
  missing = [start for start, flag in zip(starts, flags) if flag]
  is_first = jax.process_index() == 0
  for start, images in _batches(sampler, num, batch_size, missing):
    contents = zip(files[start // batch_size], [images] if joined else images)
    for file, content in contents if is_first else ():
      if joined:
        with replacing(file) as fresh, fresh.open("wb") as stream:
          np.save(stream, content)
      else:
        write_png(file, content)
  if joined and is_first:
    if not out.exists():
      _join(out, [file for (file,) in files], labels)
    shutil.rmtree(folder)
  multihost_utils.sync_global_devices("samples written")
  return sum(min(batch_size, num - start) for start in missing)


def write_png(path: pathlib.Path, pixels: np.ndarray) -> None:
  """Writes an image [X, Y, 1 or 3] uint8."""
  with replacing(path) as fresh:
    to_picture(pixels).save(fresh, "PNG")


def write_grid(path: pathlib.Path, images: np.ndarray, columns: int) -> None:
  """Writes images [n, X, Y, 1 or 3] uint8 side by side into a PNG file."""
  write_png(path, image_grid(images, columns))


def _join(
  out: pathlib.Path, parts: list[pathlib.Path], labels: np.ndarray
) -> None:
  """Makes one npz file of all parts, of which one is in memory at a time."""
  shape = len(labels), *np.load(parts[0], mmap_mode="r").shape[1:]
  header = {"descr": "|u1", "fortran_order": False, "shape": shape}
  with replacing(out) as fresh, zipfile.ZipFile(fresh, "w") as archive:
    with archive.open("arr_0.npy", "w", force_zip64=True) as stream:
      np.lib.format.write_array_header_2_0(stream, header)
      for part in parts:
        stream.write(np.load(part, mmap_mode="r").data)
    with archive.open("arr_1.npy", "w") as stream:
      np.save(stream, labels)
