"""Reads files of named tensors without running code from them.

Safetensors files, sharded safetensors and the zip checkpoints of `torch.save`
become flat dicts of NumPy arrays. A torch checkpoint is a pickle; here it is
read as data: tensors are rebuilt, every other class becomes an inert object.
"""

import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import pickle
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401, gives NumPy the names bfloat16 and float8_*
import numpy as np
import safetensors
import safetensors.numpy

_Arrays = dict[str, Any]
_EXPECTED = (
  "a safetensors file, a directory or *.index.json of safetensors shards, or"
  " a zip checkpoint of torch.save (torch >= 1.6)"
)
_NESTS = ("ema", "model", "state_dict")  # where checkpoints keep the weights
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format
_MAX_LISTED = 20  # keys named in an error

# The dtypes that safetensors.numpy reads back, then all; torch's names.
_SAFE_DTYPES = (
  *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
  *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
# What the safetensors format calls the dtypes.
_STORED_DTYPES = {
  **{f"{kind}{bits}": f"{name}{bits}" for kind, name, bits in (
    *(("F", "float", bits) for bits in (16, 32, 64)),
    *(("I", "int", bits) for bits in (8, 16, 32, 64)),
    *(("U", "uint", bits) for bits in (8, 16, 32, 64)),
  )},
  **{"BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
  **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}  # fmt: skip
_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
_DTYPES = (*_SAFE_DTYPES, "complex128", *(f"float8_{kind}" for kind in _FLOAT8))


def read_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the named tensors of a checkpoint; the content decides the format.

  Args:
    path: a `.safetensors` file, a directory or `*.index.json` of safetensors
      shards, or a zip checkpoint of `torch.save` (`.pth`, `.pt`, `.bin`).
    key: top-level entry that holds the weights. By default the first of "ema",
      "model" and "state_dict" that is a dict of tensors, else the top level.

  Returns:
    Arrays by name, without the "module." that DistributedDataParallel puts
    before every name. Treat them as read-only: tied weights share memory.

  Raises:
    FileNotFoundError: `path`, or a shard it needs, does not exist.
    ValueError: the file is damaged or of another kind, or holds no dict of
      tensors (under `key`).
  """
  return _read(path, key, _read_file)


def open_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, "StoredTensor | np.ndarray"]:
  """Opens the named tensors of a checkpoint as `read_tensors` reads them.

  Tensors of safetensors stay in their file: `np.asarray` maps one into memory,
  where the parts that are used are read. Those of other files are read.

  Args:
    path: as for `read_tensors`.
    key: as for `read_tensors`.

  Returns:
    Tensors by name, with `shape` and `dtype`.

  Raises:
    FileNotFoundError: as for `read_tensors`.
    ValueError: as for `read_tensors`.
  """
  return _read(path, key, _open_file)


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
    file: the file.
    offset: of its first byte.
    shape: its shape.
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
    """Maps the tensor; what is in memory is freed with the array."""
    if not self.size:  # nothing to map
      return np.zeros(self.shape, dtype or self.dtype)
    array = np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    array = np.asarray(array)
    return array if dtype is None else array.astype(dtype, copy=bool(copy))


def _read(
  path: str | os.PathLike, key: str | None, read: "_ReadFile"
) -> _Arrays:
  path = pathlib.Path(path)
  if not path.exists():
    raise FileNotFoundError(f"{path}: no such file; expected {_EXPECTED}")
  if path.is_dir() or _sniff(path) == "index":
    tensors = _read_shards(path, key, read)
  else:
    tensors = read(path, key)
  if all(name.startswith("module.") for name in tensors):
    tensors = {n.removeprefix("module."): t for n, t in tensors.items()}
  return tensors


def _error(path: pathlib.Path, found: str) -> ValueError:
  found = " ".join(found.split())  # other libraries' messages may have lines
  return ValueError(f"{path}: found {found}; expected {_EXPECTED}")


def _sniff(path: pathlib.Path) -> str:
  """Returns "zip", "safetensors" or "index", else says what the file is."""
  with open(path, "rb") as file:
    head = file.read(64)
  text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
  if head.startswith(b"PK\x03\x04"):
    return "zip"
  # Before the pickles: a header of 640 bytes also starts with 0x80 0x02.
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


_ReadFile = Callable[[pathlib.Path, str | None], _Arrays]


def _open_file(path: pathlib.Path, key: str | None) -> _Arrays:
  if _sniff(path) != "safetensors":
    return _read_file(path, key)
  try:
    with safetensors.safe_open(path, "numpy"):  # the whole file is there
      pass
  except safetensors.SafetensorError as err:
    raise _error(path, f"a damaged safetensors file ({err})") from err
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
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


def _read_file(path: pathlib.Path, key: str | None) -> _Arrays:
  found = _sniff(path)
  if found == "zip":
    return _read_torch_zip(path, key)
  if found != "safetensors":
    raise _error(path, found)
  try:
    tensors = safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as err:
    raise _error(path, f"a damaged safetensors file ({err})") from err
  except (AttributeError, TypeError) as err:
    raise ValueError(
      f"{path}: found a dtype that NumPy does not read ({err}); expected one"
      f" of {', '.join(_SAFE_DTYPES)}"
    ) from err
  return _select(path, tensors, key, np.ndarray)


def _read_shards(
  path: pathlib.Path, key: str | None, read: _ReadFile
) -> _Arrays:
  """Reads the shards that a directory holds or an index file lists."""
  weight_map, shards = {}, []
  if path.is_dir():
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) == 1:
      return _read_shards(indexes[0], key, read)
    shards = [file.name for file in sorted(path.glob("*.safetensors"))]
    if indexes or not shards:
      found = f"a directory with {len(indexes)} indexes, {len(shards)} shards"
      error = ValueError if indexes else FileNotFoundError
      raise error(f"{path}: found {found}; expected {_EXPECTED}")
  else:
    try:
      weight_map = json.loads(path.read_bytes())["weight_map"]
      shards = sorted(set(weight_map.values()))
      # Shards lie next to their index: a path could name any file.
      if not shards or any(pathlib.Path(s).name != s for s in shards):
        raise ValueError(f"shards {shards}")
    except (ValueError, KeyError, TypeError, AttributeError) as err:
      raise _error(path, f"JSON that is no shard index ({err!r})") from err
  folder = path if path.is_dir() else path.parent
  tensors = {}
  for shard in shards:
    file = folder / shard
    if not file.is_file():
      raise FileNotFoundError(f"{file}: no such file, but {path} lists it")
    content = read(file, key)
    if both := sorted(tensors.keys() & content.keys()):
      raise ValueError(
        f"{file}: {both[0]!r} is in another shard; pass one file"
      )
    tensors |= content
  if missing := sorted(weight_map.keys() - tensors.keys()):
    raise ValueError(f"{path}: no shard holds {missing[0]!r}, which it lists")
  return tensors


def _select(
  path: pathlib.Path, tree: object, key: str | None, leaf: type
) -> dict[str, Any]:
  """Finds the dict of tensors (instances of `leaf`) in a checkpoint."""

  def problem(value):
    if not isinstance(value, dict) or not value:
      return "not a dict with entries"
    for k, v in value.items():
      if not isinstance(k, str) or not isinstance(v, leaf):
        return f"entry {k!r} is not a dense tensor under a text name"
    return None

  entries = tree if isinstance(tree, dict) else {}
  tried = {k: entries[k] for k in _NESTS if k in entries}
  tried["the top level"] = tree
  if key is not None:
    tried = {key: entries[key]} if key in entries else {}
  problems = {name: problem(value) for name, value in tried.items()}
  for name in problems:
    if problems[name] is None:
      return tried[name]
  reasons = "; ".join(f"{k}: {v}" for k, v in problems.items()) or "no entry"
  listed = ", ".join(repr(k) for k in list(entries)[:_MAX_LISTED])
  more = ", ..." if len(entries) > _MAX_LISTED else ""
  raise ValueError(
    f"{path}: found no dict of tensors for key={key!r} ({reasons}); expected"
    f" one, at the top or by a key among its {len(entries)}: [{listed}{more}]"
  )


def _read_torch_zip(path: pathlib.Path, key: str | None) -> _Arrays:
  with open(path, "rb") as file:
    try:
      archive = zipfile.ZipFile(file)
      names = [f"/{name}" for name in archive.namelist()]
      roots = [n[1:-8] for n in names if n.endswith("/data.pkl")]
      heads = [archive.read(f"{root}data.pkl") for root in roots]
      order = "little"  # of archives older than the record
      for name in names:
        if name.endswith("/byteorder"):
          order = archive.read(name[1:]).decode()
    except Exception as err:  # a damaged zip raises nearly anything
      raise _error(path, f"a truncated or damaged zip ({err!r})") from err
    # Early versions of torch.load run TorchScript, even with weights_only.
    if any(name.endswith("/constants.pkl") for name in names):
      raise _error(path, "a TorchScript archive")
    if len(roots) != 1:
      raise _error(path, f"a zip with {len(roots)} data.pkl records")
    if order not in ("little", "big"):
      raise _error(path, f"byte order {order!r}, neither little nor big")
    tensors = _load_with_torch(path, key)
    if tensors is None:
      reader = _TorchZip(io.BytesIO(heads[0]), encoding="utf-8")
      tensors = reader.read(path, key, archive, f"{roots[0]}data/", order)
    return tensors


def _load_with_torch(path: pathlib.Path, key: str | None) -> _Arrays | None:
  """Reads with torch; None where it is not installed or refuses the file."""
  try:
    import torch  # optional, and slow to import
  except (ImportError, OSError):
    return None
  try:
    tree = torch.load(path, map_location="cpu", weights_only=True)
  except Exception:  # our own reader reads it, or says what is wrong
    return None
  arrays = {}
  for name, tensor in _select(path, tree, key, torch.Tensor).items():
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
      raise ValueError(
        f"{path}: tensor {name!r} is {tensor.layout} {dtype} on"
        f" {tensor.device}; expected a dense one of {', '.join(_DTYPES)}"
      )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    arrays[name] = raw.view(dtype).reshape(tuple(tensor.shape))
  return arrays


class _Inert:
  """Stands for a class of the pickle: swallows all it is given, runs nothing.

  The methods are static because a pickle may apply them to the class as well.
  """

  def __new__(cls, *args, **kwargs):
    del args, kwargs
    return object.__new__(cls)

  @staticmethod
  def _swallow(*args, **kwargs):
    del args, kwargs
    return _Inert()

  __call__ = __setstate__ = __setitem__ = append = extend = add = _swallow


class _StateDict(dict):
  """Stands for OrderedDict, without the attributes that torch hangs on it."""

  __setstate__ = _Inert._swallow


class _Storage(NamedTuple):
  key: str
  dtype: str  # "uint8" where the storage is untyped
  size: int  # in elements of `dtype`


class _Tensor(NamedTuple):
  """A tensor not read yet: optimizer state is never read at all."""

  storage: _Storage
  offset: int  # in elements, as are the strides
  shape: tuple[int, ...]
  strides: tuple[int, ...]
  dtype: str


def _lazy(args: tuple, dtype: object, metadata: tuple) -> _Tensor | _Inert:
  if not isinstance(args[0], _Storage) or any(metadata):
    return _Inert()  # quantized numbers; conjugate and negated views
  return _Tensor(*args, dtype)


_STORAGES = {
  **{"Double": "float64", "Float": "float32", "Half": "float16"},
  **{"BFloat16": "bfloat16", "ComplexFloat": "complex64", "Bool": "bool"},
  **{"ComplexDouble": "complex128", "Long": "int64", "Int": "int32"},
  **{"Short": "int16", "Char": "int8", "Byte": "uint8", "Untyped": "uint8"},
}
# What is more than an inert object; torch's dtypes and storages become text.
_KNOWN = {
  "collections.OrderedDict": _StateDict,
  "torch.Size": tuple,
  "torch.storage.UntypedStorage": "uint8",
  **{f"torch.{dtype}": dtype for dtype in _DTYPES},
  **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
}


class _TorchZip(pickle.Unpickler):
  """Reads tensors from an archive of `torch.save` and runs none of its code."""

  def find_class(self, module: str, name: str) -> Any:
    # New functions each time, as a pickle may set attributes on what it gets.
    rebuild = {
      "_rebuild_tensor_v2": lambda *a: _lazy(
        a[:4], getattr(a[0], "dtype", None), a[6:]
      ),
      "_rebuild_tensor_v3": lambda *a: _lazy(a[:4], a[6], a[7:]),
      "_rebuild_parameter": lambda data, *_: data,
      "_rebuild_parameter_with_state": lambda data, *_: data,
    }
    if module == "torch._utils" and name in rebuild:
      return rebuild[name]
    return _KNOWN.get(f"{module}.{name}", _Inert)

  def persistent_load(self, pid: Any) -> Any:
    if isinstance(pid, tuple) and len(pid) == 5 and pid[1] in _DTYPES:
      return _Storage(pid[2], pid[1], pid[4])
    return _Inert()

  def read(
    self,
    path: pathlib.Path,
    key: str | None,
    archive: zipfile.ZipFile,
    folder: str,
    order: str,
  ) -> _Arrays:
    try:
      tree = self.load()
    except Exception as err:  # a damaged pickle raises nearly anything
      raise _error(path, f"a damaged data.pkl ({err!r})") from err
    # Storages are read once for all tensors that share them.
    record = functools.cache(lambda name: archive.read(f"{folder}{name}"))
    arrays = {}
    for name, tensor in _select(path, tree, key, _Tensor).items():
      try:
        raw = record(tensor.storage.key)
        arrays[name] = _view(tensor, raw, swap=order != sys.byteorder)
      except Exception as err:  # as above; numbers may be of any type
        raise _error(path, f"tensor {name!r} with {err}") from err
    return arrays


def _view(tensor: _Tensor, raw: bytes, *, swap: bool) -> np.ndarray:
  """Lays a tensor over the bytes of its storage, in which it must lie."""
  storage, offset, shape, strides, dtype = tensor
  if len(raw) < (size := storage.size * np.dtype(storage.dtype).itemsize):
    raise ValueError(f"a storage of {len(raw)} bytes, not {size}")
  if dtype not in _DTYPES:
    raise ValueError(f"dtype {dtype!r}")
  dtype = np.dtype(dtype)
  if not all(type(n) is int and n >= 0 for n in (offset, *shape, *strides)):
    raise ValueError(f"offset, shape, strides {offset, shape, strides}")
  if 0 in shape:
    return np.zeros(shape, dtype)
  axes = list(zip(shape, strides, strict=True))
  last = offset + sum((n - 1) * s for n, s in axes)
  if last >= (size := len(raw) // dtype.itemsize):
    raise ValueError(f"element {last} outside its storage of {size}")
  if swap:
    unit = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    raw = np.frombuffer(raw, f"u{unit}").byteswap().data
  # A stride along an axis of length 1 means nothing and may be anything.
  steps = [s * dtype.itemsize * (n > 1) for n, s in axes]
  return np.ndarray(shape, dtype, raw, offset * dtype.itemsize, steps)
