"""Files of named tensors: safetensors, in shards or not, and `torch.save`.

They are read as flat dicts of NumPy arrays, without running code from them:
torch reads its files with `weights_only=True`, and objects that are no tensors,
such as the arguments of a training run, become placeholders that do nothing.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes  # noqa: F401, gives NumPy the name bfloat16
import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from moh_jax.data.files import import_extra
from moh_jax.runtime.files import read_json, replacing, write_whole

TORCH_SUFFIXES = (".pth", ".pt", ".bin")
# Text in the headers of our files, which transformers asks for.
HEADER = {"format": "pt"}
# Bytes of a file at most, unless one tensor has more, as transformers splits.
SHARD_SIZE = 5 * 10**9
# What transformers reads of a folder, the first that is there; others may lie
# beside it, such as adapters and other formats.
_FIRST = tuple(
  f"{name}{suffix}"
  for name in ("model.safetensors", "pytorch_model.bin")
  for suffix in ("", ".index.json")
)
_NESTS = ("ema", "model", "state_dict")  # entries that may hold the weights
# Names in safetensors of the dtypes that weights have.
_NAMES = dict(F64="float64", F32="float32", F16="float16", BF16="bfloat16")


class _Index(msgspec.Struct):
  weight_map: dict[str, str]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a safetensors file, which `np.asarray` reads.

  Attributes:
    file: path of the file.
    name: of the tensor in it.
    shape: shape of the tensor.
    dtype: name of its dtype in NumPy, of quantized ones that of the file.
  """

  file: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str

  def __array__(self, dtype: Any = None, copy: bool | None = None):
    with safetensors.safe_open(self.file, "numpy") as file:
      return np.asarray(file.get_tensor(self.name), dtype)


def read_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the named tensors of a checkpoint, as `open_tensors` opens them."""
  return {n: np.asarray(x) for n, x in open_tensors(path, key).items()}


def open_tensors(
  path: str | os.PathLike, key: str | None = None
) -> dict[str, StoredTensor | np.ndarray]:
  """Opens the named tensors of a checkpoint.

  Args:
    path: a safetensors file, a file of `torch.save`, an index of shards, or a
      folder. Of a folder `model.safetensors` and `pytorch_model.bin`, or what
      their index lists, are read alone, as transformers does; else all
      safetensors, or all files of `torch.save`.
    key: entry of a file of `torch.save` that holds the weights. By default it
      is the first of "ema", "model" and "state_dict" that is a dict, else the
      top level itself.

  Returns:
    Tensors by name, with `shape` and `dtype`; names without the "module." that
    DistributedDataParallel puts before every name, and without the "_orig_mod."
    that torch.compile puts before those of a compiled module.

  Raises:
    FileNotFoundError: `path`, or a shard it needs, does not exist.
    ValueError: a file is damaged or of another kind, or holds no dict of
      tensors (under `key`), or torch, which reads it, is not installed.
  """
  tensors: dict[str, Any] = {}
  for file in _files(pathlib.Path(path)):
    if not file.is_file():
      raise FileNotFoundError(f"{file}: no such file")
    is_torch = zipfile.is_zipfile(file) or file.suffix in TORCH_SUFFIXES
    content = _open_torch(file, key) if is_torch else _open(file)
    if both := tensors.keys() & content.keys():
      raise ValueError(
        f"{file}: {min(both)!r} is in another file too; pass one of them"
      )
    tensors |= content
  tensors = {n.replace("_orig_mod.", ""): t for n, t in tensors.items()}
  if all(name.startswith("module.") for name in tensors):
    tensors = {n.removeprefix("module."): t for n, t in tensors.items()}
  return tensors


def read_text(path: str | os.PathLike) -> dict[str, str]:
  """The text in a safetensors file's header; empty for anything else."""
  with contextlib.suppress(safetensors.SafetensorError, OSError):
    with safetensors.safe_open(path, "numpy") as file:
      return file.metadata() or {}
  return {}


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  """The files of a checkpoint, some of which may be missing."""
  if path.is_dir():
    for name in _FIRST:
      if (path / name).is_file():
        return _files(path / name)
    for suffixes in ((".safetensors",), TORCH_SUFFIXES):
      if found := sorted(f for f in path.iterdir() if f.suffix in suffixes):
        return found
    raise FileNotFoundError(
      f"{path}: holds no .safetensors, {', '.join(TORCH_SUFFIXES)}"
    )
  if not path.name.endswith(".index.json"):
    return [path]
  listed = read_json(path, _Index)["weight_map"].values()
  # A name alone, so that an index leads nowhere else.
  return [path.parent / pathlib.Path(name).name for name in sorted({*listed})]


def _open(path: pathlib.Path) -> dict[str, StoredTensor]:
  try:
    with safetensors.safe_open(path, "numpy") as file:
      slices = {name: file.get_slice(name) for name in file.keys()}
      return {
        name: StoredTensor(
          path,
          name,
          tuple(x.get_shape()),
          _NAMES.get(x.get_dtype(), x.get_dtype()),
        )
        for name, x in slices.items()
      }
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path}: no safetensors file and no zip of torch.save, or damaged, such "
      f"as by a download that failed: {error}"
    ) from error


class _Inert:
  """Stands for any object of a pickle that is no tensor: it does nothing."""

  def __new__(cls, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)

  def __setstate__(self, state: Any) -> None:
    del state


def _open_torch(path: pathlib.Path, key: str | None) -> dict[str, np.ndarray]:
  """Opens the tensors of a file of `torch.save`; those of a zip are mapped."""
  torch = import_extra("torch", f"{path}: a file of torch.save", "torch")
  load = torch.serialization
  is_zip = zipfile.is_zipfile(path)  # torch before 1.6 wrote another format
  try:
    names = load.get_unsafe_globals_in_checkpoint(path) if is_zip else []
    inert = [(type(name, (_Inert,), {}), name) for name in names]
    with load.safe_globals(inert):
      tree = torch.load(path, "cpu", weights_only=True, mmap=is_zip)
  except Exception as error:  # a damaged file raises nearly anything
    # The rest of torch's message advises to run the file's code.
    advice = r"(?s).*(WeightsUnpickler error: |trusted source\.)"
    why = re.sub(advice, "", str(error)).strip().partition("\n")[0]
    raise ValueError(
      f"{path}: torch does not read it as data, or it is damaged: {why}"
    ) from error
  entries = tree if isinstance(tree, dict) else {}
  nests = [name for name in _NESTS if isinstance(entries.get(name), dict)]
  name = key if key is not None else next(iter(nests), None)
  found = tree if name is None else entries.get(name)
  if not isinstance(found, dict) or not found or not all(
    isinstance(n, str) and torch.is_tensor(x) for n, x in found.items()
  ):  # fmt: skip
    where = "the top level" if name is None else f"its entry {name!r}"
    raise ValueError(
      f"{path}: {where} is no dict of tensors; --key must name one of "
      f"{list(entries)[:20]}"
    )
  return {n: _to_numpy(torch, x) for n, x in found.items()}


def _to_numpy(torch: Any, tensor: Any) -> np.ndarray:
  """A tensor's numbers, also of dtypes that NumPy itself does not have."""
  dtype = str(tensor.dtype).removeprefix("torch.")
  raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
  return raw.view(dtype).reshape(tuple(tensor.shape))


def write_file(
  path: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  dtype: str,
  metadata: Mapping[str, str],
) -> None:
  """Writes one file, whole or not at all; its tensors are held in memory.

  Args:
    path: file to write or replace; parent folders are made.
    tensors: names and arrays.
    dtype: dtype to store, "float32" or "bfloat16".
    metadata: texts to store in the header.

  Raises:
    FloatingPointError: a tensor holds NaN or infinite numbers.
  """
  held = {name: _stored(name, array, dtype) for name, array in tensors}
  with replacing(path) as temporary:
    temporary.touch()
    mode = temporary.stat().st_mode  # the library's files are their owner's
    safetensors.numpy.save_file(held, temporary, dict(metadata))
    temporary.chmod(mode)


def _stored(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
  # The library stores arrays as they lie, also transposed ones.
  array = np.asarray(array, dtype, order="C")
  if not np.isfinite(array).all():
    raise FloatingPointError(
      f"tensor {name!r} holds NaN or infinite numbers as {dtype}"
    )
  return array


def write_folder(
  folder: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  dtype: str,
  metadata: Mapping[str, str],
) -> None:
  """Writes the weights of a Hugging Face model: shards and index, or one file.

  Args:
    folder: existing folder to write to.
    tensors: names and arrays; those of one shard are held in memory.
    dtype: dtype to store, "float32" or "bfloat16".
    metadata: texts to store in every header.
  """
  shards: list[list[str]] = []  # the names in each
  total = 0
  for shard in _filled(tensors, dtype):
    write_file(folder / f"{len(shards)}.part", shard.items(), dtype, metadata)
    shards.append(list(shard))
    total += sum(array.nbytes for array in shard.values())
  weight_map = {}
  for number, names in enumerate(shards):
    file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
    file = file if len(shards) > 1 else "model.safetensors"
    (folder / f"{number}.part").rename(folder / file)
    weight_map |= dict.fromkeys(names, file)
  if len(shards) > 1:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    write_whole(folder / "model.safetensors.index.json", text.encode())


def _filled(
  tensors: Iterable[tuple[str, np.ndarray]], dtype: str
) -> Iterator[dict[str, np.ndarray]]:
  """The tensors of each shard, as they are stored."""
  shard: dict[str, np.ndarray] = {}
  for name, array in tensors:
    stored = _stored(name, array, dtype)
    size = stored.nbytes + sum(x.nbytes for x in shard.values())
    if shard and size > SHARD_SIZE:
      yield shard
      shard = {}
    shard[name] = stored
  yield shard


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Context with a temporary folder to fill, which is then renamed to `path`.

  An error removes the folder and leaves `path` unchanged.

  Args:
    path: folder to make, with its parents; it may exist if it is empty.

  Raises:
    ValueError: `path` is a file, or a folder with something in it.
  """
  path = path.resolve()  # of a link, what it leads to
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise ValueError(
      f"{path} is no new or empty folder; choose another --out, or --overwrite"
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary:
    growing = pathlib.Path(temporary, path.name)
    growing.mkdir()
    yield growing
    os.replace(growing, path)
