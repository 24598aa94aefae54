"""Sets of equally large images to be scored: an npz file or a folder.

A set has a path, the images' size and number, and reads them in order, a batch
at a time, without holding them all.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from moh_jax.data.decode import open_picture, picture_size, read_image
from moh_jax.data.image_folders import find_files
from moh_jax.data.transforms import center_crop
from moh_jax.runtime.files import (
  check_regular,
  npz_damage,
  npz_names,
  open_member,
  read_npz,
)

_LAYOUT = "arr_0 of dtype uint8 and shape (images, X, Y, 3 or 1)"
_THREADS = 8
_SEED = 0  # of the order of a folder's images


@dataclasses.dataclass(frozen=True)
class NpzImages:
  """`arr_0` of an npz file, compressed or not; made by `open_images`."""

  path: str
  shape: tuple[int, int, int, int]
  fortran_order: bool

  @property
  def size(self) -> tuple[int, int]:
    """(X, Y) of every image."""
    return self.shape[1:3]

  def __len__(self) -> int:
    return self.shape[0]

  def batches(self, batch_size: int) -> Iterator[np.ndarray]:
    """Images in order, [b, X, Y, 3] uint8; the last batch may be smaller.

    Grey images have three equal channels.

    Raises:
      ValueError: the file is damaged.
    """
    if self.fortran_order:  # its first image ends with the file
      images = read_npz(self.path, ["arr_0"])["arr_0"]
      for start in range(0, len(self), batch_size):
        yield _rgb(np.ascontiguousarray(images[start : start + batch_size]))
      return
    image_bytes = int(np.prod(self.shape[1:]))
    with open_member(self.path, "arr_0") as (stream, _):
      for start in range(0, len(self), batch_size):
        count = min(batch_size, len(self) - start)
        with npz_damage(self.path):
          data = np.frombuffer(stream.read(count * image_bytes), np.uint8)
          images = data.reshape(count, *self.shape[1:])
        yield _rgb(images)


def _rgb(images: np.ndarray) -> np.ndarray:
  return np.broadcast_to(images, (*images.shape[:3], 3))


@dataclasses.dataclass(frozen=True)
class FolderImages:
  """Image files of a folder and those below; made by `open_images`.

  They come in random order, the same in each call: the Inception Score compares
  the images of a block, which would be of few classes in order of the paths.
  """

  path: str
  files: tuple[str, ...]
  size: tuple[int, int]
  is_cropped: bool = False  # to `size`

  def __len__(self) -> int:
    return len(self.files)

  def batches(self, batch_size: int) -> Iterator[np.ndarray]:
    """Images [b, X, Y, 3] uint8; the last batch may be smaller.

    Raises:
      ValueError: a file is damaged.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for start in range(0, len(self), batch_size):
        files = self.files[start : start + batch_size]
        yield np.stack(list(pool.map(self._read, files)))

  def _read(self, file: str) -> np.ndarray:
    """An image [*size, 3] uint8."""
    image = read_image(file, 3)
    if not self.is_cropped and image.shape[:2] != self.size:
      raise ValueError(f"{file} has {_written(image.shape)}, others have not")
    return center_crop(image, self.size)


ImageSet = NpzImages | FolderImages


def open_images(
  path: str | os.PathLike, image_size: int | None = None
) -> ImageSet:
  """Checks a set of images and makes it readable.

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
  return NpzImages(str(path), shape, fortran_order)


def _open_folder(path: pathlib.Path, image_size: int | None) -> FolderImages:
  files = find_files(path)
  sizes = [_image_size(file) for file in files]
  order = np.random.RandomState(_SEED).permutation(len(files))
  names = tuple(files[i] for i in order)
  for file, size in zip(files, sizes):
    if image_size and min(size) < image_size:
      raise ValueError(
        f"{file} has {_written(size)}, fewer than --image-size {image_size}"
      )
    if not image_size and size != sizes[0]:
      raise ValueError(
        f"{path}: all images must have one size; {files[0]} has "
        f"{_written(sizes[0])}, {file} has {_written(size)}; --image-size N "
        "crops them to N x N"
      )
  if image_size:
    return FolderImages(str(path), names, (image_size,) * 2, is_cropped=True)
  return FolderImages(str(path), names, sizes[0])


def _image_size(file: str) -> tuple[int, int]:
  """(X, Y) from the header alone, for a folder may hold 50,000 images."""
  check_regular(file)
  try:
    with open_picture(file) as image:
      return picture_size(image)
  except Exception as error:  # a damaged image raises nearly anything
    raise ValueError(
      f"{file}: not an image Pillow can read: {error}"
    ) from error


def _written(size: tuple[int, int]) -> str:
  return f"{size[0]} rows x {size[1]} columns"
