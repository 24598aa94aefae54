"""Images from a diffusion checkpoint: a few into memory, many into files."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
import xxhash
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from PIL import PngImagePlugin

from moh_jax.config import Config, MeshConfig, check_command
from moh_jax.data.decode import open_image, to_picture
from moh_jax.inference.restore import Restored
from moh_jax.models.generation import Decode, image_grid, make_image_sampler
from moh_jax.runtime import sharding
from moh_jax.runtime.files import (
  check_regular,
  disk_errors,
  inside,
  npz_damage,
  only_writer,
  read_bytes,
  read_npz,
  remove_files,
  replacing,
  write_whole,
)
from moh_jax.runtime.json_files import plain, same_settings
from moh_jax.runtime.processes import ask_first_process

Labels = Sequence[int | None]

_SETTINGS = "settings.json"
_MOST_PNG_BYTES = 1 << 30
_MARK = "moh_jax"  # name of a text in PNG files


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
    if start is not None and config.diffusion.space == "pixel":
      if np.abs(start).max(initial=0) > 1:
        raise ValueError("start: pixels must be in [-1, 1]")
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
    names = (*(restored.class_names or map(str, range(classes))), "none")
    self._names = tuple(
      name if names.count(name) == 1 else f"{name}-{label}"
      for label, name in enumerate(names)
    )
    self._mesh, self._seed, self._params = mesh, seed, restored.params

  def batch(self, start: int, size: int) -> np.ndarray:
    """Images [size, X, Y, channels] uint8, from index `start` on.

    Raises:
      ValueError: `start` is below 0, `size` below 1, or their sum above 2^31.
    """
    if start < 0 or size < 1 or start + size > 2**31:
      raise ValueError(
        f"start={start} must be at least 0, size={size} at least 1, and their "
        "sum at most 2^31"
      )
    index = np.arange(start, start + size, dtype=np.int32)
    index = sharding.pad_to_shards(index, self._mesh)
    labels = self.label(index)
    parts = [sharding.put_batch(part, self._mesh) for part in (index, labels)]
    given = {
      name: sharding.put_batch(rows[index % len(rows)], self._mesh)
      for name, rows in self._given.items()
    }
    images = self._paint(self._params, self._seed, *parts, **given)
    return sharding.gather(images)[:size]

  def label(self, index: np.ndarray) -> np.ndarray:
    """Labels of images by index, int32."""
    return self.labels[index % len(self.labels)]

  def name(self, label: int) -> str:
    """Name of a label: of its class, else its number; "none" for no label.

    Where several classes have one name, the number follows it.
    """
    return self._names[label]


def _rows(name: str, rows: np.ndarray, config: Config) -> np.ndarray:
  rows = np.asarray(rows, np.float32)
  shape = config.model.input_shape
  if rows.ndim != 4 or rows.shape[1:] != shape or not len(rows):
    raise ValueError(
      f"{name} of shape {rows.shape} must be (n, {str(shape)[1:]} with n at "
      "least 1"
    )
  if not np.isfinite(rows).all():
    raise ValueError(f"{name} holds NaN or infinite numbers")
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
    elif label != int(label) or not 0 <= label < classes:
      raise ValueError(f"label {label} must be in [0, {classes - 1}], or none")
  if not 0 <= seed < 2**31:
    raise ValueError(f"seed={seed} must be in [0, {2**31 - 1}]")


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
  OUT/LABEL/NUMBER.png, see `Sampler.name`.

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
  out, settings = pathlib.Path(out), {**settings, "num": num}
  starts = range(0, num, batch_size)
  labels = sampler.label(np.arange(num, dtype=np.int32))
  joined = out.suffix == ".npz"
  if joined:
    folder, settings["batch_size"] = _parts(out), batch_size
    files = [[folder / f"{start:09d}.npz"] for start in starts]
  else:
    folder = out
    pictures = [
      # A name of several words, "cup/mug" say, is one folder.
      inside(out, sampler.name(label).replace("/", "%2F"), "class name")
      / f"{i:06d}.png"
      for i, label in enumerate(labels)
    ]
    files = [pictures[start : start + batch_size] for start in starts]
  every = list(itertools.chain.from_iterable(files))

  def is_there(file: pathlib.Path) -> bool:
    if not joined and file.exists():
      _check_picture(file, _name(file, folder), settings)
    return file.exists()

  def find_missing() -> list[bool]:
    if joined and _is_finished(out, settings):
      return [False] * len(files)
    if not _has_settings(folder, settings):
      if found := next((file for file in every if file.exists()), None):
        raise ValueError(
          f"{found} is there, and no {folder / _SETTINGS} says what it was "
          "made with; remove it, or choose another --out"
        )
      folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_writer(folder))
    if not _has_settings(folder, settings):
      write_whole(folder / _SETTINGS, _comment(settings))
    return [not all(map(is_there, batch)) for batch in files]

  with contextlib.ExitStack() as held:  # the folder, by the first process
    flags = ask_first_process(find_missing, len(files))
    missing = [start for start, flag in zip(starts, flags) if flag]
    is_first = jax.process_index() == 0
    for start, images in _batches(sampler, num, batch_size, missing):
      contents = zip(files[start // batch_size], [images] if joined else images)
      for file, content in contents if is_first else ():
        file.parent.mkdir(exist_ok=True)
        with disk_errors(str(file), "what was written before is"):
          mark = _mark(settings, _name(file, folder), content)
          with replacing(file) as fresh:
            (_write_part if joined else write_png)(fresh, content, mark)
    if joined and is_first:
      # Another process may have finished it where files have no locks.
      if not (_is_finished(out, settings) if missing else out.exists()):
        with disk_errors(str(out), f"what is in {folder} is"):
          _join(out, every, num, labels, settings)
      _remove_parts(folder, every, settings)
    multihost_utils.sync_global_devices("samples written")
    return sum(min(batch_size, num - start) for start in missing)


def _name(file: pathlib.Path, folder: pathlib.Path) -> str:
  return file.relative_to(folder).as_posix()


def _mark(settings: dict[str, Any], name: str, pixels: np.ndarray) -> str:
  """Tells a file of these samples from another one and from a damaged one."""
  content = _comment(settings) + os.fsencode(name) + pixels.tobytes()
  return xxhash.xxh3_128(content).hexdigest()


def _write_part(path: pathlib.Path, images: np.ndarray, mark: str) -> None:
  with path.open("wb") as stream:
    np.savez(stream, images=images, mark=mark)


def write_png(path: pathlib.Path, pixels: np.ndarray, mark: str = "") -> None:
  """Writes an image [X, Y, 1 or 3] uint8, with a text that `_mark` made."""
  info = PngImagePlugin.PngInfo()
  if mark:
    info.add_text(_MARK, mark)
  to_picture(pixels).save(path, "PNG", pnginfo=info)


def _check_picture(
  file: pathlib.Path, name: str, settings: dict[str, Any]
) -> None:
  """Checks that a picture is whole, and one of these samples.

  Raises:
    ValueError: it is damaged, or another one.
  """
  content = read_bytes(file, _MOST_PNG_BYTES)
  try:
    with open_image(io.BytesIO(content), str(file)) as picture:
      pixels, mark = np.asarray(picture), picture.info.get(_MARK)
  except Exception as error:  # a damaged image raises nearly anything
    raise ValueError(f"{file}: damaged, remove it: {error}") from error
  if mark != _mark(settings, name, pixels):
    raise ValueError(f"{file}: is not the image sampled here; remove it")


def write_grid(path: pathlib.Path, images: np.ndarray, columns: int) -> None:
  """Writes images [n, X, Y, 1 or 3] uint8 side by side into a PNG file."""
  with replacing(path) as fresh:
    write_png(fresh, image_grid(images, columns))


def _parts(out: pathlib.Path) -> pathlib.Path:
  """The folder of the finished batches of an npz file."""
  return out.with_name(out.name + ".parts")


def _is_finished(out: pathlib.Path, settings: dict[str, Any]) -> bool:
  """Whether the file is there; its comment says what it was made with."""
  if not out.exists():
    return False
  check_regular(out)
  with contextlib.suppress(ValueError), npz_damage(out):
    with zipfile.ZipFile(out) as archive:
      is_ours = json.loads(archive.comment) == plain(settings)
      is_ours &= archive.namelist() == ["arr_0.npy", "arr_1.npy"]
      if is_ours and archive.testzip() is None:  # compares checksums
        return True
  raise ValueError(
    f"{out} exists and was made with other settings, or is damaged; remove it "
    "or choose another file"
  )


def _comment(settings: dict[str, Any]) -> bytes:
  return json.dumps(settings, sort_keys=True).encode()


def _has_settings(folder: pathlib.Path, settings: dict[str, Any]) -> bool:
  """Whether a folder has settings, which must be those of the same images."""
  if folder.is_symlink():
    raise ValueError(f"{folder} is a symbolic link; remove it")
  what = f"{folder} holds unfinished samples"
  return same_settings(folder / _SETTINGS, settings, what)


def _remove_parts(
  parts: pathlib.Path, files: list[pathlib.Path], settings: dict[str, Any]
) -> None:
  """Removes the parts, and the settings last; other files stay.

  After a kill the next call goes on with it.
  """
  try:
    _has_settings(parts, settings)
  except ValueError:  # they are of another file, or elsewhere
    return
  for file in files:
    file.unlink(missing_ok=True)
  for left in parts.glob(".*.npz.*.tmp"):  # by kills
    left.unlink(missing_ok=True)
  remove_files(parts, _SETTINGS)


def _read_part(part: pathlib.Path, settings: dict[str, Any]) -> np.ndarray:
  """The images that `_write_part` wrote.

  Raises:
    ValueError: the file is damaged, or another one.
  """
  try:
    images, mark = read_npz(part, ("images", "mark")).values()
  except ValueError as error:
    raise ValueError(f"{error}; remove it") from error
  if mark != _mark(settings, part.name, images):
    raise ValueError(f"{part}: is not what was sampled here; remove it")
  return images


def _join(
  out: pathlib.Path,
  parts: list[pathlib.Path],
  num: int,
  labels: np.ndarray,
  settings: dict[str, Any],
) -> None:
  """Streams the parts into one npz, a part in memory at a time."""
  shape = _read_part(parts[0], settings).shape[1:]
  header = {"descr": "|u1", "fortran_order": False, "shape": (num, *shape)}
  with replacing(out) as fresh, zipfile.ZipFile(fresh, "w") as archive:
    with archive.open("arr_0.npy", "w", force_zip64=True) as stream:
      np.lib.format.write_array_header_2_0(stream, header)
      for part in parts:
        stream.write(_read_part(part, settings).tobytes())
    with archive.open("arr_1.npy", "w") as stream:
      np.save(stream, labels)
    archive.comment = _comment(settings)
