"""Reads zip checkpoints of `torch.save` as data, running no pickled code."""

import functools
import io
import pathlib
import pickle
import pickletools
import sys
import zipfile
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401, gives NumPy the names bfloat16 and float8_*
import numpy as np

from moh_jax import memory
from moh_jax.array_files import check_ratio
from moh_jax.convert.tensor_select import DTYPES, read_error, select_tensors

_Arrays = dict[str, Any]
# `torch.save` does not compress; what others packed again shrinks a little.
_MOST_RATIO = 20
_SMALL = 1 << 16  # bytes of an archive that may unpack to more


def read_torch_zip(path: pathlib.Path, key: str | None) -> _Arrays:
  """Reads the tensors of a zip checkpoint, with torch if it is installed.

  Args:
    path: the checkpoint.
    key: top-level entry that holds the weights, see `read_tensors`.

  Returns:
    NumPy arrays by name.

  Raises:
    ValueError: the zip is damaged, or not a checkpoint.
  """
  with open(path, "rb") as file:
    try:
      archive = zipfile.ZipFile(file)
      size = path.stat().st_size
      check_ratio(archive, size + _SMALL, _MOST_RATIO)
      unpacked = sum(info.file_size for info in archive.infolist())
      memory.check(unpacked, "the archive")
      names = [f"/{name}" for name in archive.namelist()]
      roots = [n[1:-8] for n in names if n.endswith("/data.pkl")]
      heads = [archive.read(f"{root}data.pkl") for root in roots]
      order = "little"  # old archives have no record of the byte order
      for name in names:
        if name.endswith("/byteorder"):
          order = archive.read(name[1:]).decode()
    except Exception as err:  # a damaged zip raises nearly anything
      raise read_error(path, f"a truncated or damaged zip ({err!r})") from err
    # Early versions of torch.load run TorchScript, even with weights_only.
    if any(name.endswith("/constants.pkl") for name in names):
      raise read_error(path, "a TorchScript archive")
    if len(roots) != 1:
      raise read_error(path, f"a zip with {len(roots)} data.pkl records")
    if order not in ("little", "big"):
      raise read_error(path, f"byte order {order!r}, neither little nor big")
    arrays = _load_with_torch(path, key)
    if arrays is not None:
      return arrays
    try:
      _check_memo(heads[0])
      tree = _TorchZip(io.BytesIO(heads[0]), encoding="utf-8").load()
    except Exception as err:  # a damaged pickle raises nearly anything
      raise read_error(path, f"a damaged data.pkl ({err!r})") from err
    # Storages are read once for all tensors that share them.
    record = functools.cache(lambda n: archive.read(f"{roots[0]}data/{n}"))
    arrays = {}
    for name, tensor in select_tensors(path, tree, key, _Tensor).items():
      try:
        raw = record(tensor.storage.key)
        arrays[name] = _view(tensor, raw, swap=order != sys.byteorder)
      except Exception as err:  # as above; numbers may be of any type
        raise read_error(path, f"tensor {name!r} with {err}") from err
    return arrays


def _load_with_torch(path: pathlib.Path, key: str | None) -> _Arrays | None:
  """Reads with torch; returns None if it is missing or rejects the file."""
  try:
    import torch  # optional, and slow to import
  except (ImportError, OSError):
    return None
  try:
    tree = torch.load(path, map_location="cpu", weights_only=True)
  except Exception:  # our own reader reads it, or says what is wrong
    return None
  arrays = {}
  for name, tensor in select_tensors(path, tree, key, torch.Tensor).items():
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
      raise ValueError(
        f"{path}: tensor {name!r} is {tensor.layout} {dtype} on"
        f" {tensor.device}; expected a dense one of {', '.join(DTYPES)}"
      )
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    arrays[name] = raw.view(dtype).reshape(tuple(tensor.shape))
  return arrays


def _check_memo(content: bytes) -> None:
  """Refuses numbers of memo entries that a pickle of its length cannot reach.

  The unpickler makes a table up to the largest number before it is used.
  """
  for code, number, _ in pickletools.genops(content):
    if code.name.endswith("PUT") and int(number) > len(content):
      raise ValueError(f"memo entry {number} in {len(content)} bytes")


class _Inert:
  """Placeholder for any class of the pickle: accepts all calls, does nothing.

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
  """Placeholder for OrderedDict, which ignores the attributes torch adds."""

  __setstate__ = _Inert._swallow


class _Storage(NamedTuple):
  """Memory that tensors share: a record of the archive."""

  key: str
  dtype: str  # "uint8" where the storage is untyped
  size: int  # in elements of `dtype`


class _Tensor(NamedTuple):
  """A tensor that is not read yet, so that optimizer state never is."""

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
# Classes that are not replaced by `_Inert`; dtypes and storages become names.
_KNOWN = {
  "collections.OrderedDict": _StateDict,
  "torch.Size": tuple,
  "torch.storage.UntypedStorage": "uint8",
  **{f"torch.{dtype}": dtype for dtype in DTYPES},
  **{f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()},
}


class _TorchZip(pickle.Unpickler):
  """Unpickler of an archive of `torch.save` that runs none of its code."""

  def find_class(self, module: str, name: str) -> Any:
    # New functions for each call, since a pickle may set attributes on them.
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
    if isinstance(pid, tuple) and len(pid) == 5 and pid[1] in DTYPES:
      return _Storage(pid[2], pid[1], pid[4])
    return _Inert()


def _view(tensor: _Tensor, raw: bytes, *, swap: bool) -> np.ndarray:
  """Makes an array that views the bytes of its storage, within its bounds."""
  storage, offset, shape, strides, dtype = tensor
  if len(raw) < (size := storage.size * np.dtype(storage.dtype).itemsize):
    raise ValueError(f"a storage of {len(raw)} bytes, not {size}")
  if dtype not in DTYPES:
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
