"""The back ends of Pallas: which one a device runs, and with which tiles.

Tiles that the command `tune-kernels` measured on a device have priority: they
are read from the file that the environment variable MOH_JAX_BLOCK_SIZES names.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.ops.kernels.hopper import Hopper
from moh_jax.ops.kernels.problem import Kernels
from moh_jax.ops.kernels.sizes import (
  MAX_HEAD_DIM,
  BlockSizes,
  Key,
  Tile,
  fitting,
)
from moh_jax.ops.kernels.tpu import Tpu
from moh_jax.ops.kernels.triton import Triton
from moh_jax.ops.target import Target, target
from moh_jax.runtime.json_files import read_json

FILE_VARIABLE = "MOH_JAX_BLOCK_SIZES"
# By the name that Pallas has for them; the first that is able runs a call.
BACKENDS: dict[str, Kernels] = {
  "mosaic_gpu": Hopper(),
  "triton": Triton(),
  "mosaic_tpu": Tpu(),
}


def pallas_backend(
  device: Target, dtype: str = "", head_dim: int = 0
) -> tuple[str, str]:
  """The first back end that is able to run on a device.

  Args:
    device: the device; a CPU interprets kernels.
    dtype: name of the dtype of queries, keys and values; without it the back
      end is one that serves all.
    head_dim: D.

  Returns:
    Its name, and what would be needed if there is none.
  """
  call = device, dtype, head_dim
  for name, kernels in BACKENDS.items():
    if not kernels.unable(*call):
      return name, ""
  return "", BACKENDS["triton"].unable(*call)


def kernel_options(
  device: Target, dtype: str = "", head_dim: int = 0
) -> dict[str, Any]:
  """The keyword arguments with which the functions of kernels run on a device.

  Args:
    device: the device.
    dtype: as in `pallas_backend`.
    head_dim: D.

  Returns:
    "backend", the back end of Pallas, and "interpret", True on a CPU.

  Raises:
    ValueError: no kernels exist for the device.
  """
  backend, reason = pallas_backend(device, dtype, head_dim)
  if reason:
    raise ValueError(f"implementation='kernel' needs {reason}")
  return {"backend": backend, "interpret": device.platform == "cpu"}


def has_kernels(device: Target, dtype: str = "", head_dim: int = 0) -> bool:
  """Whether kernels are compiled for a device; a CPU interprets them, slowly.

  Args:
    device: the device.
    dtype: as in `pallas_backend`.
    head_dim: D.
  """
  compiled = device.platform != "cpu"
  return compiled and not pallas_backend(device, dtype, head_dim)[1]


def block_sizes(
  backend: str,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  per_head: int | None = None,
) -> BlockSizes:
  """Looks up the tiles for the device that a program is traced for.

  Args:
    backend: of Pallas, one of `BACKENDS`.
    head_dim: D, at most 256.
    dtype: dtype of the queries.
    per_head: tokens that a head has on average (N * active heads / H): blocks
      get smaller where these are few. None keeps the blocks as they are.

  Returns:
    Measured sizes if the file of the environment has them, else the defaults.

  Raises:
    ValueError: the head dim is too large.
  """
  dtype, kernels = jnp.dtype(dtype), BACKENDS[backend]
  sizes = measured().get(Key(backend, target().kind, head_dim, dtype.name))
  if sizes is None:
    sizes = fitting(kernels.tiles, head_dim, dtype)
  # A head's last block is half empty on average, which costs more the fewer
  # blocks there are.
  if per_head is not None and per_head < kernels.few_rows:
    least = min(kernels.least_rows, sizes.rows)
    sizes = sizes.with_rows(max(least, sizes.rows // 2))
  return sizes


def read(path: str | os.PathLike) -> dict[Key, BlockSizes]:
  """Reads a file of measured sizes, as `tune-kernels` writes it.

  Args:
    path: a JSON list with one entry per `Key`.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is not such a file, or its tiles would give wrong results.
  """
  try:
    entries = read_json(path, list[dict])
    return dict(map(_parse, entries))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path} is not a file of block sizes, for {FILE_VARIABLE}: {error}"
    ) from None


def _parse(entry: dict) -> tuple[Key, BlockSizes]:
  """Reads and checks one entry of a file."""
  backend, dim = entry["backend"], entry["head_dim"]
  if backend not in BACKENDS:
    raise ValueError(f"backend={backend!r} must be one of {list(BACKENDS)}")
  if not 1 <= dim <= MAX_HEAD_DIM:
    raise ValueError(f"head_dim={dim!r} must be in [1, {MAX_HEAD_DIM}]")
  tiles = {}
  for name in ("forward", "dq", "dkv"):
    try:
      tiles[name] = Tile(**entry[name])
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}: {error}") from None
  sizes = BlockSizes(**tiles)
  BACKENDS[backend].check(sizes)
  dtype = jnp.dtype(entry["dtype"]).name
  return Key(backend, str(entry["device"]), dim, dtype), sizes


@functools.cache
def measured() -> dict[Key, BlockSizes]:
  """Reads the file that MOH_JAX_BLOCK_SIZES names, once; empty without it."""
  path = os.environ.get(FILE_VARIABLE)
  return read(path) if path else {}
