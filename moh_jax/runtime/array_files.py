"""Arrays in npz files, whose headers may lie about what follows.

The sizes that an archive states are checked against memory and against the
file's length before an array is made; `zipfile` never unpacks more than it
states.
"""

import contextlib
import math
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from moh_jax.runtime import memory
from moh_jax.runtime.files import DEFLATE_RATIO, check_regular

Header = tuple[tuple[int, ...], bool, np.dtype]


def npz_names(path: str | os.PathLike) -> tuple[str, ...]:
  """Names of the arrays of an npz file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is not an npz archive, or a damaged one.
  """
  with _open(path) as archive:
    return tuple(name.removesuffix(".npy") for name in archive.namelist())


def read_npz(
  path: str | os.PathLike, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
  """Reads arrays of an npz file; pickled ones are refused.

  Args:
    path: the file.
    names: of the arrays; None reads all.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the archive is damaged, lacks an array, or has arrays that do
      not fit into memory.
  """
  names = npz_names(path) if names is None else tuple(names)
  arrays, needed = {}, 0
  for name in names:
    with open_member(path, name) as (stream, (shape, fortran, dtype)):
      needed += math.prod(shape) * dtype.itemsize
      memory.check(needed, f"{path}: {name} of shape {shape}")
      with npz_damage(path):
        data = np.frombuffer(stream.read(), dtype)
        arrays[name] = data.reshape(shape, order="F" if fortran else "C")
  return arrays


@contextlib.contextmanager
def open_member(
  path: str | os.PathLike, name: str
) -> Iterator[tuple[IO[bytes], Header]]:
  """Opens an array of an npz file.

  Yields:
    A stream at the first byte of the data, and the array's shape, whether it
    is in Fortran order, and its dtype, which together fit the stream's length.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the archive is damaged, or the array is none of plain numbers.
  """
  with _open(path) as archive:
    with npz_damage(path):
      info = archive.getinfo(f"{name}.npy")
      stream = archive.open(info)
      version = np.lib.format.read_magic(stream)
      # Version 3 differs in text that only names of fields need.
      read = np.lib.format.read_array_header_2_0
      if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
      header = shape, _, dtype = read(stream)
      if dtype.hasobject:
        raise ValueError(f"{name} has dtype object, which is never read")
      left = info.file_size - stream.tell()
      needed = math.prod(shape) * dtype.itemsize
      if min(shape, default=0) < 0 or needed != left:
        raise ValueError(
          f"{name} has {left} bytes, its shape {shape} needs {needed}"
        )
    with stream:
      yield stream, header


@contextlib.contextmanager
def npz_damage(path: str | os.PathLike) -> Iterator[None]:
  """Names the file in the errors of a damaged archive."""
  try:
    yield
  except Exception as error:  # a damaged archive raises nearly anything
    raise ValueError(f"{path}: damaged npz file: {error}") from error


@contextlib.contextmanager
def _open(path: str | os.PathLike) -> Iterator[zipfile.ZipFile]:
  path = pathlib.Path(path)
  try:
    check_regular(path)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"{path}: no such file; expected an npz file or a folder of images"
    ) from error
  if not zipfile.is_zipfile(path):
    raise ValueError(f"{path}: not an npz file, or a truncated one")
  with contextlib.ExitStack() as stack:
    with npz_damage(path):
      archive = stack.enter_context(zipfile.ZipFile(path))
      check_ratio(archive, path.stat().st_size, DEFLATE_RATIO)
    yield archive


def check_ratio(archive: zipfile.ZipFile, size: int, most: int) -> None:
  """Refuses a zip file whose members share their bytes or unpack to too much.

  Args:
    archive: the open file.
    size: its bytes.
    most: bytes that one byte of it may become.

  Raises:
    ValueError: the members together have more.
  """
  unpacked = sum(info.file_size for info in archive.infolist())
  if unpacked > most * size:
    raise ValueError(
      f"unpacks to {unpacked:,} bytes, more than {most} times its {size:,}"
    )
