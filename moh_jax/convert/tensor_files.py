"""Reads files of named tensors without running code from them.

Safetensors files, sharded safetensors and the zip checkpoints of `torch.save`
become flat dicts of NumPy arrays. A torch checkpoint is a pickle, which
`torch_zip.py` reads as data: tensors are rebuilt, and objects of any other
class are replaced by placeholders that do nothing.
"""

import dataclasses
import math
import os
import pathlib
from typing import Annotated, Any

import ml_dtypes  # noqa: F401, gives NumPy the names bfloat16 and float8_*
import msgspec
import numpy as np
import safetensors

from moh_jax.convert.tensor_select import EXPECTED, read_error, select_tensors
from moh_jax.convert.torch_zip import read_torch_zip
from moh_jax.files import check_regular
from moh_jax.json_files import MAX_BYTES, FileName, parse_json, read_json

_Tensors = dict[str, Any]
# Bytes of a safetensors header. The format allows 100 MB, of which its own
# parser makes ten times as much; a tensor takes about 100 bytes.
_MAX_HEADER = MAX_BYTES

# Names of dtypes in the safetensors format -> in NumPy.
_STORED_DTYPES = {
  **{f"{kind}{bits}": f"{name}{bits}" for kind, name, bits in (
    *(("F", "float", bits) for bits in (16, 32, 64)),
    *(("I", "int", bits) for bits in (8, 16, 32, 64)),
    *(("U", "uint", bits) for bits in (8, 16, 32, 64)),
  )},
  **{"BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
  **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}  # fmt: skip


class _Index(msgspec.Struct):
  """What is read of an index of shards, which lie in the same folder."""

  weight_map: Annotated[dict[str, FileName], msgspec.Meta(min_length=1)]


def read_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the named tensors of a checkpoint, as `open_tensors` opens them.

  Args:
    path: as for `open_tensors`.
    key: as for `open_tensors`.

  Returns:
    Arrays by name. Treat them as read-only: tied weights share memory.

  Raises:
    FileNotFoundError: as for `open_tensors`.
    ValueError: as for `open_tensors`.
  """
  return {
    name: np.array(x) if isinstance(x, StoredTensor) else x
    for name, x in open_tensors(path, key).items()
  }


def open_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, "StoredTensor | np.ndarray"]:
  """Opens the named tensors of a checkpoint; the content decides the format.

  `np.asarray` maps a tensor of a safetensors file into memory, so only the
  parts that are used are read. Tensors of other files are read at once.

  Args:
    path: `.safetensors` file, directory or `*.index.json` of safetensors
      shards, or zip checkpoint of `torch.save` (`.pth`, `.pt`, `.bin`).
    key: top-level entry that holds the weights. By default it is the first of
      "ema", "model" and "state_dict" that is a dict, else the top level itself;
      a message says which where there are several.

  Returns:
    Tensors by name, with `shape` and `dtype`; names without the "module." that
    DistributedDataParallel puts before every name.

  Raises:
    FileNotFoundError: `path`, or a shard it needs, does not exist.
    ValueError: the file is damaged or of another kind, or holds no dict of
      tensors (under `key`).
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file; expected {EXPECTED}")
  if not path.is_dir():
    check_regular(path)
  is_index = path.is_file() and _sniff(path) == "index"
  open_path = _open_shards if path.is_dir() or is_index else _open_file
  tensors = open_path(path, key)
  if all(name.startswith("module.") for name in tensors):
    tensors = {n.removeprefix("module."): t for n, t in tensors.items()}
  return tensors


def read_text(path: str | os.PathLike) -> dict[str, str]:
  """The text in a safetensors file's header; empty for anything else."""
  try:
    with safetensors.safe_open(path, "numpy") as file:
      return file.metadata() or {}
  except (safetensors.SafetensorError, OSError):
    return {}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a safetensors file, not read yet.

  Attributes:
    file: path of the file.
    offset: offset of the tensor's first byte in the file.
    shape: shape of the tensor.
    dtype: its dtype.
  """

  file: pathlib.Path
  offset: int
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  def __array__(self, dtype: Any = None, copy: bool | None = None):
    """Maps the tensor into memory; the pages are freed with the array."""
    if not self.size:  # an empty range cannot be mapped
      return np.zeros(self.shape, dtype or self.dtype)
    array = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    return np.array(array, dtype, copy=copy)


def _sniff(path: pathlib.Path) -> str:
  """Returns "zip", "safetensors" or "index", else a description of the file."""
  with open(path, "rb") as file:
    head = file.read(64)
  text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
  if head.startswith(b"PK\x03\x04"):
    return "zip"
  # Before pickles, since a safetensors header of 640 bytes starts like one.
  header_size = int.from_bytes(head[:8], "little")
  if head[8:9] == b"{" and header_size <= _MAX_HEADER:
    return "safetensors"
  if text.startswith(b"{"):
    return "index"
  if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
    return "a bare pickle (legacy torch.save, never read: re-save it)"
  if text.startswith(b"<"):
    return "an HTML or XML page (a failed download?)"
  if text.startswith(b"version https://git-lfs"):
    return "a Git LFS pointer (run `git lfs pull`)"
  return f"unknown content {head[:8]!r}..." if head else "an empty file"


def _open_file(path: pathlib.Path, key: str | None) -> _Tensors:
  found = _sniff(path)
  if found == "zip":
    return read_torch_zip(path, key)
  if found != "safetensors":
    raise read_error(path, found)
  try:
    with safetensors.safe_open(path, "numpy"):  # checks header and size
      pass
  except safetensors.SafetensorError as err:
    raise read_error(path, f"a damaged safetensors file ({err})") from err
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = parse_json(file.read(size), dict[str, dict], str(path))
  header.pop("__metadata__", None)
  tensors = {}
  for name, entry in header.items():
    if entry["dtype"] not in _STORED_DTYPES:
      raise ValueError(
        f"{path}: tensor {name!r} has dtype {entry['dtype']}; expected one of"
        f" {', '.join(_STORED_DTYPES)}"
      )
    tensors[name] = StoredTensor(
      path,
      8 + size + entry["data_offsets"][0],
      tuple(entry["shape"]),
      np.dtype(_STORED_DTYPES[entry["dtype"]]),
    )
  return select_tensors(path, tensors, key, StoredTensor)


def _open_shards(path: pathlib.Path, key: str | None) -> _Tensors:
  """Opens the shards that a directory holds or an index file lists."""
  weight_map, shards = {}, []
  if path.is_dir():
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
      return _open_shards(indexes[0], key)
    shards = [file.name for file in sorted(path.glob("*.safetensors"))]
    if indexes or not shards:
      found = f"a directory with {len(indexes)} indexes, {len(shards)} shards"
      error = ValueError if indexes else FileNotFoundError
      raise error(f"{path}: found {found}; expected {EXPECTED}")
  else:
    try:
      weight_map = read_json(path, _Index)["weight_map"]
      shards = sorted(set(weight_map.values()))
    except ValueError as err:
      raise read_error(path, f"JSON that is no shard index ({err})") from err
  folder = path if path.is_dir() else path.parent
  tensors = {}
  for shard in shards:
    file = folder / shard
    if not file.is_file():
      raise FileNotFoundError(f"{file}: no such file, but {path} lists it")
    content = _open_file(file, key)
    if both := sorted(tensors.keys() & content.keys()):
      raise ValueError(
        f"{file}: {both[0]!r} is in another shard; pass one file"
      )
    tensors |= content
  if missing := sorted(weight_map.keys() - tensors.keys()):
    raise ValueError(f"{path}: no shard holds {missing[0]!r}, which it lists")
  return tensors
