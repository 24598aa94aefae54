"""Files of named tensors: safetensors, in shards or not, and `torch.save`.

They are read as flat dicts of NumPy arrays, without running code from them, and
safetensors are written tensor by tensor. A file of `torch.save` is a pickle in
a zip: torch reads it with `weights_only=True`, and objects that are no tensors,
such as the arguments of a training run, become placeholders that do nothing.
"""

import collections
import dataclasses
import json
import logging
import math
import os
import pathlib
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, BinaryIO

import ml_dtypes  # noqa: F401, gives NumPy the names bfloat16 and float8_*
import msgspec
import numpy as np
import safetensors

from moh_jax.data.input_files import import_extra
from moh_jax.runtime.files import (
  check_ratio,
  check_regular,
  named_errors,
  replacing,
  temporary_beside,
  write_whole,
)
from moh_jax.runtime.json_files import (
  MAX_BYTES,
  FileName,
  parse_json,
  read_json,
)

_LOG = logging.getLogger(__name__)
_Tensors = dict[str, Any]
_EXPECTED = (
  "a safetensors file, a zip checkpoint of torch.save (torch >= 1.6), a"
  " directory or *.index.json of such shards, or a directory with one of them"
)
# Bytes of a safetensors header. The format allows 100 MB, of which its own
# parser makes ten times as much; a tensor takes about 100 bytes.
_MAX_HEADER = MAX_BYTES
TORCH_SUFFIXES = (".pth", ".pt", ".bin")
# What transformers reads of a folder, the first that is there, alone or by its
# index; others may lie beside it, such as adapters and other formats.
_FIRST = ("model.safetensors", "pytorch_model.bin")
_NESTS = ("ema", "model", "state_dict")  # entries that may hold the weights
_MAX_LISTED = 20  # keys named in an error
# Tensors of torch.save may share numbers, as tied ones do: so many times the
# file's size they may have, and in a small file so many bytes.
_MOST_SHARED, _LEAST_BOUND = 4, 1 << 26
_MAX_CLASSES = 500  # of a pickle that is read again for each dict or list

# Names of dtypes in the safetensors format -> in NumPy.
_STORED_DTYPES = {
  **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
  **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
  **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
  **{"BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
  **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}  # fmt: skip
# Of torch's tensors, by the names that torch and NumPy share.
_TORCH_DTYPES = (
  *_STORED_DTYPES.values(),
  *("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)

DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # that are written
SHARD_SIZE = 5 * 10**9  # bytes of a file at most, as transformers splits
_ALIGNMENT = 8
_ROWS_BYTES = 2**25  # bytes of a tensor that are converted at one time


class _Index(msgspec.Struct):
  """What is read of an index of shards, which lie in the same folder."""

  weight_map: Annotated[dict[str, FileName], msgspec.Meta(min_length=1)]


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

  def __array__(self, dtype: Any = None, copy: bool | None = None):
    """Maps the tensor into memory; the pages are freed with the array."""
    if 0 in self.shape:  # an empty range cannot be mapped
      return np.zeros(self.shape, dtype or self.dtype)
    array = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    return np.array(array, dtype, copy=copy)


def read_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the named tensors of a checkpoint, as `open_tensors` opens them.

  Returns:
    Arrays by name. Treat them as read-only: tied weights share memory.
  """
  return {
    name: np.array(x) if isinstance(x, StoredTensor) else x
    for name, x in open_tensors(path, key).items()
  }


def open_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, StoredTensor | np.ndarray]:
  """Opens the named tensors of a checkpoint; the content decides the format.

  Tensors are mapped from their file, so only the parts that are used are read:
  those of a safetensors file by `np.asarray`.

  Args:
    path: `.safetensors` file, zip checkpoint of `torch.save` (`.pth`, `.pt`,
      `.bin`), a directory or `*.index.json` of such shards, or a directory with
      one such file. Of a directory `model.safetensors` and `pytorch_model.bin`
      are read alone, as transformers does; else safetensors come first.
    key: top-level entry that holds the weights. By default it is the first of
      "ema", "model" and "state_dict" that is a dict, else the top level itself;
      a message says which where there are several.

  Returns:
    Tensors by name, with `shape` and `dtype`; names without the "module." that
    DistributedDataParallel puts before every name, and without the "_orig_mod."
    that torch.compile puts before those of a compiled module.

  Raises:
    FileNotFoundError: `path`, or a shard it needs, does not exist.
    ValueError: the file is damaged or of another kind, or holds no dict of
      tensors (under `key`), or torch, which reads it, is not installed.
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file; expected {_EXPECTED}")
  if not path.is_dir():
    check_regular(path)
  sharded = path.is_dir() or _sniff(path) == "index"
  tensors = (_open_shards if sharded else _open_file)(path, key)
  tensors = {n.replace("_orig_mod.", ""): t for n, t in tensors.items()}
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


def _error(path: pathlib.Path, found: str) -> ValueError:
  """Makes an error that says what a file is and what was expected."""
  found = " ".join(found.split())  # on one line, whatever library raised it
  return ValueError(f"{path}: found {found}; expected {_EXPECTED}")


def _sniff(path: pathlib.Path) -> str:
  """Returns "zip", "safetensors" or "index", else a description of the file."""
  with open(path, "rb") as file:
    head = file.read(64)
  # Before pickles, since a safetensors header of 640 bytes starts like one.
  header_size = int.from_bytes(head[:8], "little")
  if head[8:9] == b"{" and header_size <= _MAX_HEADER:
    return "safetensors"
  text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
  for begin, found in (
    (b"PK\x03\x04", "zip"),
    (b"{", "index"),
    (b"\x80", "a bare pickle (legacy torch.save, never read: re-save it)"),
    (b"<", "an HTML or XML page (a failed download?)"),
    (b"version https://git-lfs", "a Git LFS pointer (run `git lfs pull`)"),
  ):
    if text.startswith(begin):
      return found
  return f"unknown content {head[:8]!r}..." if head else "an empty file"


def _open_file(path: pathlib.Path, key: str | None) -> _Tensors:
  found = _sniff(path)
  if found == "zip":
    return _open_torch(path, key)
  if found != "safetensors":
    raise _error(path, found)
  try:
    with safetensors.safe_open(path, "numpy"):  # checks header and size
      pass
  except safetensors.SafetensorError as err:
    raise _error(path, f"a damaged safetensors file ({err})") from err
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
  return _select(path, tensors, key, StoredTensor)


def _open_shards(path: pathlib.Path, key: str | None) -> _Tensors:
  """Opens the shards that a directory holds or an index file lists."""
  weight_map, folder = {}, path
  if path.is_dir():
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    saved = sorted(f.name for f in path.iterdir() if f.suffix in TORCH_SUFFIXES)
    kind = "safetensors" if shards else "bin"
    indexes = sorted(path.glob(f"*.{kind}.index.json"))
    for name in _FIRST:
      index = path / f"{name}.index.json"
      if index.is_file():
        indexes = [index]
        break
      if (path / name).is_file():
        return _open_file(path / name, key)
    if len(indexes) == 1:
      whole = path / indexes[0].name.removesuffix(".index.json")
      listed = _weight_map(indexes[0]).values()
      # transformers would take it, whatever the index says.
      if whole.is_file() and whole.name not in listed:
        raise ValueError(
          f"{path}: holds {whole.name} and {indexes[0].name}; name the one of "
          "them that is meant"
        )
      return _open_shards(indexes[0], key)
    if not shards and len(saved) == 1:
      shards = saved
    if indexes or not shards:
      files = f"{len(shards)} shards, {len(saved)} files of torch.save"
      found = f"a directory with {len(indexes)} indexes, {files}"
      error = ValueError if indexes or saved else FileNotFoundError
      raise error(f"{path}: found {found}; expected {_EXPECTED}")
  else:
    weight_map = _weight_map(path)
    shards, folder = sorted(set(weight_map.values())), path.parent
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
    for name in content:
      if (listed := weight_map.get(name, shard)) != shard:
        raise ValueError(f"{path}: {name!r} is in {shard}, not in {listed}")
    tensors |= content
  if missing := sorted(weight_map.keys() - tensors.keys()):
    raise ValueError(f"{path}: no shard holds {missing[0]!r}, which it lists")
  return tensors


def _weight_map(path: pathlib.Path) -> dict[str, str]:
  """The shard of each tensor, as an index says."""
  try:
    return read_json(path, _Index)["weight_map"]
  except ValueError as err:
    raise _error(path, f"JSON that is no shard index ({err})") from err


class _Inert:
  """Stands for any object of a pickle that is no tensor: it does nothing.

  Attributes:
    made: class of what stands for it where items are put into it: of dicts,
      such as yacs' CfgNode, or of lists, such as deque.
  """

  made: type | None = None

  def __new__(cls, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return cls.made() if cls.made else object.__new__(cls)

  def __setstate__(self, state: Any) -> None:
    del state


def _load_tree(torch: Any, path: pathlib.Path) -> object:
  """Reads the pickle of a zip checkpoint; raises nearly anything."""
  names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
  classes = [type(name, (_Inert,), {}) for name in names]
  while True:
    try:
      with torch.serialization.safe_globals([*zip(classes, names)]):
        return torch.load(path, "cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as err:
      # torch puts items into lists and dicts alone. Its message ends with the
      # class of anything else, which is then made one of them.
      why = str(err)
      filled = [found for found in classes if f"got {found}" in why]
      if not filled or len(classes) > _MAX_CLASSES:
        raise
      is_dict = "Can only SETITEM" in why
      filled[0].made = collections.OrderedDict if is_dict else list


def _open_torch(path: pathlib.Path, key: str | None) -> _Tensors:
  """Maps the tensors of a zip checkpoint of `torch.save` into memory."""
  torch = import_extra("torch", f"{path}: a file of torch.save", "torch")
  try:
    with zipfile.ZipFile(path) as archive:
      # torch.save stores its records as they are. torch would map compressed
      # ones as they lie, and compares no checksum.
      check_ratio(archive, path.stat().st_size, 1)
      if any(info.compress_type for info in archive.infolist()):
        raise ValueError("its records are compressed")
      if damaged := archive.testzip():
        raise ValueError(f"bad CRC of {damaged!r}")
  except Exception as err:  # a damaged zip raises nearly anything
    raise _error(path, f"a truncated or damaged zip ({err!r})") from err
  try:
    tree = _load_tree(torch, path)
  except Exception as err:  # a damaged pickle raises nearly anything
    # torch's whole message advises to run the file's code.
    why = re.search(r"(?:WeightsUnpickler error:|unsupported)\s+(.+)", str(err))
    found = re.split(r"\. |\n", why[1] if why else str(err))[0][:200]
    raise _error(
      path, f"a zip that torch does not read as data ({found})"
    ) from err
  arrays, total = {}, 0
  most = max(_MOST_SHARED * path.stat().st_size, _LEAST_BOUND)
  for name, tensor in _select(path, tree, key, torch.Tensor).items():
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (
      dtype not in _TORCH_DTYPES
      or tensor.layout != torch.strided
      or tensor.is_meta
    ):
      raise ValueError(
        f"{path}: tensor {name!r} is {tensor.layout} {dtype} on"
        f" {tensor.device}; expected a dense one of {', '.join(_TORCH_DTYPES)}"
      )
    total += tensor.numel() * tensor.element_size()
    if total > most:  # such as one number that is expanded to a matrix
      raise ValueError(
        f"{path}: tensors up to {name!r} have {total:,} bytes, must be at most "
        f"{most:,} in a file of its size"
      )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    arrays[name] = raw.view(dtype).reshape(tuple(tensor.shape))
  return arrays


def _select(
  path: pathlib.Path, tree: object, key: str | None, leaf: type
) -> _Tensors:
  """Finds the dict of tensors in a checkpoint; see `open_tensors`.

  Args:
    path: path of the checkpoint, for messages.
    tree: content of the checkpoint.
    key: entry that holds the tensors; None takes one of the usual ones.
    leaf: class of the tensors.

  Raises:
    ValueError: that entry is no dict that holds tensors alone.
  """
  entries = tree if isinstance(tree, dict) else {}
  # An entry that is broken is no reason to take another one's weights.
  nests = [name for name in _NESTS if isinstance(entries.get(name), dict)]
  name = key if key is not None else next(iter(nests), None)
  found = tree if name is None else entries.get(name)
  items = found.items() if isinstance(found, dict) else ()
  bad = [
    n for n, x in items if not isinstance(n, str) or not isinstance(x, leaf)
  ]
  if items and not bad:
    if key is None and len(nests) > 1:
      _LOG.warning("%s: the weights of its entry %r are taken", path, name)
    return found
  problem = "not a dict with entries"
  if bad:
    problem = f"entry {bad[0]!r} is not a dense tensor under a text name"
  where = "the top level" if name is None else name
  listed = ", ".join(repr(k) for k in list(entries)[:_MAX_LISTED])
  more = ", ..." if len(entries) > _MAX_LISTED else ""
  raise ValueError(
    f"{path}: found no dict of tensors for key={key!r} ({where}: {problem});"
    f" expected one, at the top or by a key among its {len(entries)}:"
    f" [{listed}{more}]"
  )


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

  def sizes(self, dtype: str) -> list[int]:
    """Bytes of each tensor."""
    width = np.dtype(dtype).itemsize
    return [math.prod(shape) * width for shape in self.shapes]


def write_file(
  path: pathlib.Path,
  planned: Sequence[Planned],
  dtype: str,
  metadata: Mapping[str, str],
) -> None:
  """Writes one file; after an error or a kill no partial file is left.

  The writer of the library safetensors needs all tensors of a file at once.
  The format is a header with names, dtypes, shapes and offsets, and then the
  bytes, so a file whose shapes are known can be written tensor by tensor.

  Args:
    path: file to write or replace; parent folders are made.
    planned: tensors of the file.
    dtype: dtype to store, "float32" or "bfloat16".
    metadata: texts to store in the header.

  Raises:
    FloatingPointError: a tensor holds NaN or infinite numbers.
    NotADirectoryError: a parent folder is a file.
    ValueError: `path` is a directory.
  """
  if path.is_dir():
    raise ValueError(f"{path}: is a directory; expected a file name")
  path.parent.mkdir(parents=True, exist_ok=True)
  header: dict[str, Any] = {"__metadata__": dict(metadata)}
  end = 0
  for part in planned:
    for name, shape, size in zip(part.names, part.shapes, part.sizes(dtype)):
      start, end = end, end + size
      header[name] = {
        "dtype": DTYPES[dtype],
        "shape": list(shape),
        "data_offsets": [start, end],
      }
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with replacing(path) as temporary, temporary.open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for part in planned:
      for name, array in zip(part.names, part.make()):
        _write_array(file, name, array, dtype)


def _write_array(
  file: BinaryIO, name: str, array: np.ndarray, dtype: str
) -> None:
  """Writes an array some rows at a time, so that no whole copy is made."""
  if not array.ndim:
    array = array[None]
  row = max(1, array.nbytes // max(1, len(array)))
  rows = max(1, _ROWS_BYTES // row)
  for start in range(0, len(array), rows):
    part = array[start : start + rows].astype(dtype, order="C")
    if not np.isfinite(part).all():
      raise FloatingPointError(
        f"tensor {name!r} holds NaN or infinite numbers as {dtype}"
      )
    file.write(part.reshape(-1).view(np.uint8).data)


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
  shards: list[list[Planned]] = [[]]
  filled = total = 0
  for part in planned:
    size = sum(part.sizes(dtype))
    if shards[-1] and filled + size > shard_size:
      shards.append([])
      filled = 0
    shards[-1].append(part)
    filled += size
    total += size
  if len(shards) == 1:
    write_file(folder / f"{stem}.safetensors", planned, dtype, metadata)
    return
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    name = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
    write_file(folder / name, shard, dtype, metadata)
    weight_map |= {tensor: name for part in shard for tensor in part.names}
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  text = json.dumps(index, indent=2) + "\n"
  write_whole(folder / f"{stem}.safetensors.index.json", text.encode())


@contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Context with a temporary folder to fill, which is then renamed to `path`.

  An error removes the folder and leaves `path` unchanged.

  Args:
    path: folder to make, with its parents; it may exist if it is empty.

  Raises:
    NotADirectoryError: a parent folder is a file.
    ValueError: `path` is a file, or a folder with something in it.
  """
  path = path.resolve()  # of a link, what it leads to
  if path.is_dir() and (found := sorted(path.iterdir())):
    raise ValueError(
      f"{path} holds {found[0].name!r}; choose a new or an empty folder"
    )
  if path.exists() and not path.is_dir():
    raise ValueError(f"{path} is a file; expected a new or an empty folder")
  path.parent.mkdir(parents=True, exist_ok=True)
  growing = temporary_beside(path)
  growing.mkdir()
  try:
    with named_errors(path, growing):
      yield growing
      os.replace(growing, path)
  finally:
    shutil.rmtree(growing, ignore_errors=True)
