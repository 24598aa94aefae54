"""Writes safetensors files whose tensors are made one at a time.

The writer of the library safetensors needs all tensors of a file at once. The
format is a header with names, dtypes, shapes and offsets, and then the bytes,
so a file whose shapes are known can be written tensor by tensor.
"""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401, gives NumPy the name bfloat16
import numpy as np

from moh_jax.files import replacing

DTYPES = {"float32": "F32", "bfloat16": "BF16"}
SHARD_SIZE = 5 * 10**9  # bytes of a file at most, as transformers splits
_ALIGNMENT = 8
_ROWS_BYTES = 2**25  # bytes of a tensor that are converted at one time


@dataclasses.dataclass(frozen=True)
class Planned:
  """Tensors to write that are made together.

  Attributes:
    names: names of the tensors.
    shapes: shape of each tensor.
    make: function that returns the tensors in this order.
  """

  names: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  make: Callable[[], Sequence[np.ndarray]]


def write_file(
  path: pathlib.Path,
  planned: Sequence[Planned],
  dtype: str,
  metadata: Mapping[str, str],
) -> None:
  """Writes one file; after an error or a kill no partial file is left.

  Args:
    path: file to write or replace; parent folders are made.
    planned: tensors of the file.
    dtype: dtype to store, "float32" or "bfloat16".
    metadata: texts to store in the header.

  Raises:
    NotADirectoryError: a parent folder is a file.
    ValueError: `path` is a directory.
  """
  if path.is_dir():
    raise ValueError(f"{path}: is a directory; expected a file name")
  path.parent.mkdir(parents=True, exist_ok=True)
  with replacing(path) as temporary, temporary.open("wb") as file:
    _write(file, planned, dtype, metadata)


def write_folder(
  folder: pathlib.Path,
  planned: Sequence[Planned],
  dtype: str,
  metadata: Mapping[str, str],
  shard_size: int,
  stem: str = "model",
) -> None:
  """Writes the weights of a Hugging Face model: shards and index, or one file.

  Args:
    folder: existing folder to write to.
    planned: tensors to write; those that are made together share a shard.
    dtype: dtype to store, "float32" or "bfloat16".
    metadata: texts to store in every header.
    shard_size: maximum bytes of a shard, unless one of `planned` has more.
    stem: beginning of the files' names.
  """
  shards = _shards(planned, dtype, shard_size)
  if len(shards) == 1:
    write_file(folder / f"{stem}.safetensors", planned, dtype, metadata)
    return
  weight_map, total = {}, 0
  for number, shard in enumerate(shards, 1):
    name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
    write_file(folder / name, shard, dtype, metadata)
    weight_map |= {tensor: name for part in shard for tensor in part.names}
    total += sum(_size(part, dtype) for part in shard)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  write_json(folder / f"{stem}.safetensors.index.json", index)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file; after an error or a kill no partial file is left."""
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Context with a temporary folder to fill, which is then renamed to `path`.

  An error removes the folder and leaves `path` unchanged; a kill leaves the
  temporary folder.

  Args:
    path: folder to make, with its parents; it may exist if it is empty.

  Raises:
    NotADirectoryError: a parent folder is a file.
    ValueError: `path` is a file, or a folder with something in it.
  """
  check_vacant(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  growing = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
  growing.mkdir()
  try:
    yield growing
    os.replace(growing, path)
  finally:
    shutil.rmtree(growing, ignore_errors=True)


def check_vacant(path: pathlib.Path) -> None:
  """Checks that a folder is empty or absent.

  Raises:
    ValueError: `path` is a file, or a folder with something in it.
  """
  if path.is_dir() and (found := sorted(path.iterdir())):
    raise ValueError(
      f"{path} holds {found[0].name!r}; choose a new or an empty folder"
    )
  if path.exists() and not path.is_dir():
    raise ValueError(f"{path} is a file; expected a new or an empty folder")


def _shards(
  planned: Sequence[Planned], dtype: str, limit: int
) -> list[list[Planned]]:
  shards: list[list[Planned]] = [[]]
  filled = 0
  for part in planned:
    size = _size(part, dtype)
    if shards[-1] and filled + size > limit:
      shards.append([])
      filled = 0
    shards[-1].append(part)
    filled += size
  return shards


def _size(part: Planned, dtype: str) -> int:
  elements = sum(math.prod(shape) for shape in part.shapes)
  return elements * np.dtype(dtype).itemsize


def _write(
  file: BinaryIO,
  planned: Sequence[Planned],
  dtype: str,
  metadata: Mapping[str, str],
) -> None:
  header: dict[str, Any] = {"__metadata__": dict(metadata)}
  end = 0
  for part in planned:
    for name, shape in zip(part.names, part.shapes):
      start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
      header[name] = {
        "dtype": DTYPES[dtype],
        "shape": list(shape),
        "data_offsets": [start, end],
      }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  file.write(len(text).to_bytes(8, "little") + text)
  for part in planned:
    for array in part.make():
      _write_array(file, array, dtype)


def _write_array(file: BinaryIO, array: np.ndarray, dtype: str) -> None:
  """Writes an array some rows at a time, so that no whole copy is made."""
  if not array.ndim:
    array = array[None]
  row = max(1, array.nbytes // max(1, len(array)))
  rows = max(1, _ROWS_BYTES // row)
  for start in range(0, len(array), rows):
    part = array[start : start + rows].astype(dtype, order="C")
    file.write(part.reshape(-1).view(np.uint8).data)
