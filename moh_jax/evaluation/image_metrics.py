"""Sets of images, and one pass of them through the feature network."""

import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from moh_jax.data.decode import describe_image, read_image
from moh_jax.data.folders import find_images
from moh_jax.data.transforms import center_crop
from moh_jax.evaluation.fid import (
  INCEPTION_BLOCK,
  Gaussian,
  Moments,
  block_score,
  moments,
)
from moh_jax.evaluation.metrics import one_late
from moh_jax.models.inception import Features, InceptionV3, prepare
from moh_jax.runtime.files import (
  npz_damage,
  npz_names,
  open_member,
  read_npz,
)
from moh_jax.runtime.sharding import check_finite

_LAYOUT = "arr_0 of dtype uint8 and shape (images, X, Y, 3 or 1)"
_THREADS = 8
_SEED = 0  # of the order of a folder's images


@dataclasses.dataclass(frozen=True)
class ImageSet:
  """A set of equally large images, made by `open_images`.

  Attributes:
    path: its file or folder.
    count: images.
    size: (X, Y) of every image.
    batches: images of a batch -> iterator of [b, X, Y, 3] uint8 in order, of
      which the last may be smaller; ValueError if a file is damaged.
  """

  path: str
  count: int
  size: tuple[int, int]
  batches: Callable[[int], Iterator[np.ndarray]]


def open_images(
  path: str | os.PathLike, image_size: int | None = None
) -> ImageSet:
  """Checks a set of images and makes it readable, a batch at a time.

  Images of a folder come in random order, the same in each call: the Inception
  Score compares the images of a block, which would be of few classes in order
  of the paths. Grey images get three equal channels.

  Args:
    path: an npz file with `arr_0`, uint8 [N, X, Y, 3] or of grey images [N, X,
      Y, 1] (other arrays in it are not read), or a folder with images of any
      format Pillow reads.
    image_size: rows and columns to which images of a folder are cropped, as in
      training of diffusion models; None: all must have one size.

  Raises:
    FileNotFoundError: there is no such file or folder, or no image in it.
    ValueError: another layout or dtype, no images, several sizes, a damaged
      file.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _open_folder(path, image_size)
  names = npz_names(path)
  if "arr_0" not in names:
    raise ValueError(f"{path}: holds {names}; images must be {_LAYOUT}")
  with open_member(path, "arr_0") as (_, (shape, fortran_order, dtype)):
    pass
  if dtype != np.uint8 or len(shape) != 4 or shape[-1] not in (1, 3):
    raise ValueError(
      f"{path}: arr_0 has dtype {dtype} and shape {shape}; images must be "
      f"{_LAYOUT}, with values 0-255"
    )
  if 0 in shape:
    raise ValueError(f"{path}: arr_0 of shape {shape} holds no image")
  batches = functools.partial(_npz_batches, path, shape, fortran_order)
  return ImageSet(str(path), shape[0], shape[1:3], batches)


def _npz_batches(
  path: pathlib.Path, shape: tuple[int, ...], whole: bool, batch_size: int
) -> Iterator[np.ndarray]:
  """Batches, read one by one unless the first image ends with the file."""
  images = read_npz(path, ["arr_0"])["arr_0"] if whole else None
  with open_member(path, "arr_0") as (stream, _):
    for start in range(0, shape[0], batch_size):
      wanted = (min(batch_size, shape[0] - start), *shape[1:])
      if whole:
        part = np.ascontiguousarray(images[start : start + batch_size])
      else:
        with npz_damage(path):
          data = np.frombuffer(stream.read(math.prod(wanted)), np.uint8)
          part = data.reshape(wanted)
      yield np.broadcast_to(part, (*wanted[:3], 3))


def _open_folder(path: pathlib.Path, image_size: int | None) -> ImageSet:
  files = find_images([str(path)])
  sizes = [describe_image(file, file)[0] for file in files]
  size = (image_size,) * 2 if image_size else sizes[0]
  for file, found in zip(files, sizes):
    if image_size and min(found) < image_size:
      raise ValueError(
        f"{file} has {_written(found)}, fewer than --image-size {image_size}"
      )
    if not image_size and found != size:
      raise ValueError(
        f"{path}: all images must have one size; {files[0]} has "
        f"{_written(size)}, {file} has {_written(found)}; --image-size N "
        "crops them to N x N"
      )
  order = np.random.RandomState(_SEED).permutation(len(files))

  def read(file: str) -> np.ndarray:
    image = read_image(file, 3)
    if not image_size and image.shape[:2] != size:
      raise ValueError(f"{file} has {_written(image.shape)}, others have not")
    return center_crop(image, size)

  def batches(batch_size: int) -> Iterator[np.ndarray]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for start in range(0, len(files), batch_size):
        part = [files[i] for i in order[start : start + batch_size]]
        yield np.stack(list(pool.map(read, part)))

  return ImageSet(str(path), len(files), size, batches)


def _written(size: tuple[int, ...]) -> str:
  return f"{size[0]} rows x {size[1]} columns"


@dataclasses.dataclass(frozen=True)
class Summary:
  """Features of a set of images; None for what was not asked for.

  Attributes:
    count: images.
    pool3: distribution of the pool3 features.
    spatial: distribution of the flattened spatial features.
    inception_score: mean over blocks of 5000 images.
    features: [N, 2048] float32 pool3 features, in order.
  """

  count: int = 0
  pool3: Gaussian | None = None
  spatial: Gaussian | None = None
  inception_score: float | None = None
  features: np.ndarray | None = None


def make_extractor(
  model: InceptionV3, resize: str = "tf1"
) -> Callable[[Any, jax.Array], Features]:
  """Jitted features of a batch; compiles once per batch and image size.

  Args:
    model: the network.
    resize: see `prepare`.

  Returns:
    (params, images [B, X, Y, 3] uint8) -> Features.
  """

  @jax.jit
  def extract(params: Any, images: jax.Array) -> Features:
    return model.apply({"params": params}, prepare(images, resize))

  return extract


def summarize(
  extract: Callable[[np.ndarray], Features],
  images: ImageSet,
  batch_size: int,
  *,
  distributions: bool = True,
  score: bool = False,
  keep_features: bool = False,
  progress: Callable[[int], Any] = lambda count: None,
  block_size: int = INCEPTION_BLOCK,
) -> Summary:
  """Streams a set of images through the network.

  Memory does not grow with the set, but for the kept features: 50,000 x 2048 x
  4 bytes are 400 MB.

  Args:
    extract: maps [batch_size, X, Y, 3] uint8 to Features on devices.
    images: the set.
    batch_size: images per call; the last batch is filled with copies, which
      are not counted.
    distributions: gather mean and covariance; needs two images.
    score: compute the Inception Score.
    keep_features: keep pool3 for precision and recall.
    progress: called with the number of images done since its last call.
    block_size: images per Inception Score.

  Raises:
    ValueError: one image where a covariance is asked for, or a damaged file.
    FloatingPointError: features that are not finite.
  """
  names = {"pool3": distributions or keep_features, "spatial": distributions}
  names = [name for name, used in {**names, "logits": score}.items() if used]
  how = (batch_size, names, progress, block_size)
  sums: dict[str, Moments] = {}
  scores, kept = [], []
  for block in _blocks(extract, images, *how):
    check_finite(block, f"the features of {images.path}")
    if distributions:
      for name in ("pool3", "spatial"):
        sums[name] = moments(block[name], sums.get(name))
    if score:
      scores.append(block_score(block["logits"]))
    if keep_features:
      kept.append(block["pool3"])
  return Summary(
    images.count,
    **{name: moments.gaussian() for name, moments in sums.items()},
    inception_score=float(np.mean(scores)) if score else None,
    features=np.concatenate(kept) if keep_features else None,
  )


def _blocks(
  extract: Callable[[np.ndarray], Features],
  images: ImageSet,
  batch_size: int,
  names: Sequence[str],
  progress: Callable[[int], Any],
  size: int,
) -> Iterator[dict[str, np.ndarray]]:
  """Features by name, [size, D] float32 on the host; the last may be fewer."""
  held: dict[str, list[np.ndarray]] = {name: [] for name in names}
  seen = 0

  def computed() -> Iterator[tuple[Features, int]]:
    for batch in images.batches(batch_size):
      fill = np.repeat(batch[-1:], batch_size - len(batch), axis=0)
      yield extract(np.concatenate([batch, fill])), len(batch)

  for features, count in one_late(computed()):
    for name, parts in held.items():
      rows = np.asarray(getattr(features, name))[:count]
      parts.append(rows.reshape(count, -1))
    seen += count
    progress(count)
    while seen >= size:
      whole = {name: np.concatenate(parts) for name, parts in held.items()}
      yield {name: rows[:size] for name, rows in whole.items()}
      held = {name: [rows[size:]] for name, rows in whole.items()}
      seen -= size
  if seen:
    yield {name: np.concatenate(parts) for name, parts in held.items()}
