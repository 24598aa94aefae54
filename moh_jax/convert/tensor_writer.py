"""Writes safetensors whose tensors are made one at a time.

safetensors' own writer wants all tensors of a file at once. The format is a
header of names, dtypes, shapes and places, then the bytes, so a file whose
shapes are known can be written as its tensors come.
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
INDEX_FILE = "model.safetensors.index.json"
_ALIGNMENT = 8
_ROWS_BYTES = 2**25  # converted and laid out at one time


@dataclasses.dataclass(frozen=True)
class Planned:
  """Tensors that are made together.

  Attributes:
    names: theirs.
    shapes: per tensor.
    make: makes them, in this order.
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
  """Writes one file, whole or not at all.

  Args:
    path: file to write or replace; its directory must exist.
    planned: its tensors.
    dtype: "float32" or "bfloat16".
    metadata: text stored in the header.

  Raises:
    FileNotFoundError: the directory of `path` does not exist.
    ValueError: `path` is a directory.
  """
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{path}: no directory {path.parent}; create it")
  if path.is_dir():
    raise ValueError(f"{path}: is a directory; expected a file name")
  with replacing(path) as temporary, temporary.open("wb") as file:
    _write(file, planned, dtype, metadata)


def write_folder(
  folder: pathlib.Path,
  planned: Sequence[Planned],
  dtype: str,
  metadata: Mapping[str, str],
  shard_size: int,
) -> None:
  """Writes the files of a Hugging Face model: shards with an index, or one.

  Args:
    folder: where to; must exist.
    planned: the tensors. Those that are made together share a shard.
    dtype: "float32" or "bfloat16".
    metadata: text stored in every header.
    shard_size: bytes of a shard at most, unless one of `planned` has more.
  """
  shards = _shards(planned, dtype, shard_size)
  if len(shards) == 1:
    write_file(folder / "model.safetensors", planned, dtype, metadata)
    return
  weight_map, total = {}, 0
  for number, shard in enumerate(shards, 1):
    name = f"model-{number:05}-of-{len(shards):05}.safetensors"
    write_file(folder / name, shard, dtype, metadata)
    weight_map |= {tensor: name for part in shard for tensor in part.names}
    total += sum(_size(part, dtype) for part in shard)
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  write_json(folder / INDEX_FILE, index)


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file, whole or not at all."""
  with replacing(path) as temporary:
    temporary.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a folder to fill, which at the end becomes `path`.

  After an error `path` is what it was; a kill leaves a folder of another name.

  Args:
    path: folder to make; may exist if it is empty.

  Raises:
    FileNotFoundError: the directory of `path` does not exist.
    ValueError: `path` is a file, or a folder with something in it.
  """
  check_vacant(path)
  growing = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
  growing.mkdir()
  try:
    yield growing
    os.replace(growing, path)
  finally:
    shutil.rmtree(growing, ignore_errors=True)


def check_vacant(path: pathlib.Path) -> None:
  """Refuses a folder that holds something.

  Raises:
    FileNotFoundError: the directory of `path` does not exist.
    ValueError: `path` is a file, or a folder with something in it.
  """
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{path}: no directory {path.parent}; create it")
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
  """Some rows at a time: a transposed copy of the whole would be as large."""
  if not array.ndim:
    array = array[None]
  row = max(1, array.nbytes // max(1, len(array)))
  rows = max(1, _ROWS_BYTES // row)
  for start in range(0, len(array), rows):
    part = array[start : start + rows].astype(dtype, order="C")
    file.write(part.reshape(-1).view(np.uint8).data)
