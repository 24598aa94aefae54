"""Sizes of the kernels' tiles for a device, a head dim and a dtype.

Sizes that the command `tune-kernels` measured on a device have priority: they
are read from the file that the environment variable MOH_JAX_BLOCK_SIZES names.
Devices that are not in the file get defaults, chosen by what the compilers
report: on GPUs tiles that fit the registers and 99 KiB of shared memory, which
every GPU since Ampere has, and on TPUs tiles whose schedule keeps the matrix
units busiest.
"""

import dataclasses
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moh_jax.ops.target import target

FILE_VARIABLE = "MOH_JAX_BLOCK_SIZES"
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Tile:
  """How much of the attention matrix a kernel works on at a time.

  Attributes:
    rows: rows of a tile: (token, head) pairs of one head.
    keys: columns of a tile: keys.
    warps: warps of a program; Triton only.
    stages: stages of the software pipeline that loads tiles; GPUs only.

  Raises:
    ValueError: a size is not an integer of at least 1.
  """

  rows: int
  keys: int
  warps: int = 4
  stages: int = 2

  def __post_init__(self):
    for name, value in vars(self).items():
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")

  def cut(self, rows: int) -> "Tile":
    """Returns a tile with at most this many rows, and warps to match."""
    if self.rows <= rows:
      return self
    warps = max(min(4, self.warps), self.warps * rows // self.rows)
    return dataclasses.replace(self, rows=rows, warps=warps)


class Key(NamedTuple):
  """What measured sizes are for.

  Attributes:
    backend: of Pallas, "triton", "mosaic_gpu" or "mosaic_tpu".
    device: `jax.Device.device_kind`.
    head_dim: D.
    dtype: name of the queries' dtype.
  """

  backend: str
  device: str
  head_dim: int
  dtype: str


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Tiles of the three kernels.

  Attributes:
    forward: tile of the forward pass; its rows are R, the rows of a block of
      the table of active heads.
    dq: tile for the gradient of the queries; on GPUs its rows divide R.
    dkv: tile for the gradients of keys and values; on GPUs its rows divide R.
  """

  forward: Tile
  dq: Tile
  dkv: Tile

  @property
  def rows(self) -> int:
    """R, the rows that `head_blocks` should give its blocks."""
    return self.forward.rows

  def check(self, backend: str) -> None:
    """Checks that tiles of the gradients cover a block exactly.

    Args:
      backend: of Pallas, "triton", "mosaic_gpu" or "mosaic_tpu".

    Raises:
      ValueError: on GPUs, the rows of dq or dkv do not divide R.
    """
    for name in ("dq", "dkv"):
      rows = getattr(self, name).rows
      # A block's last rows would be in no tile, so in no gradient.
      if backend != "mosaic_tpu" and self.rows % rows:
        raise ValueError(
          f"{name}.rows={rows} must divide forward.rows={self.rows}"
        )

  def with_rows(self, rows: int) -> "BlockSizes":
    """Returns the sizes for a table whose blocks have this many rows."""
    forward = dataclasses.replace(self.forward.cut(rows), rows=rows)
    # This kernel loops over rows and its warps share the keys: as many stay.
    dkv = dataclasses.replace(self.dkv, rows=min(self.dkv.rows, rows))
    return BlockSizes(forward, self.dq.cut(rows), dkv)


# By back end and bytes of a number: largest head dim, tiles.
_DEFAULTS = {
  ("triton", 2): (
    (32, Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    (64, Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    (96, Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    (128, Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    (256, Tile(64, 32, 4, 2), Tile(64, 16, 4, 2), Tile(32, 32, 8, 2)),
  ),
  ("triton", 4): (
    (64, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    (128, Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
    (256, Tile(32, 16, 4, 2), Tile(32, 16, 4, 2), Tile(16, 16, 4, 2)),
  ),
  ("mosaic_gpu", 2): (
    (64, Tile(128, 128, 4, 3), Tile(128, 128, 4, 2), Tile(128, 128, 4, 2)),
    (128, Tile(128, 128, 4, 2), Tile(128, 64, 4, 2), Tile(64, 128, 4, 2)),
    (256, Tile(128, 64, 4, 2), Tile(128, 64, 4, 1), Tile(64, 64, 4, 2)),
  ),
  ("mosaic_tpu", 2): ((256, Tile(256, 1024), Tile(256, 1024), Tile(256, 512)),),
  ("mosaic_tpu", 4): ((256, Tile(256, 512), Tile(256, 512), Tile(256, 512)),),
}
# The same for decoding one token: its rows are few, so only the keys matter.
_DECODE = {
  ("triton", 2): (
    (64, Tile(16, 64, 4, 3)), (128, Tile(16, 64, 4, 2)),
    (256, Tile(16, 32, 4, 2)),
  ),
  ("triton", 4): (
    (64, Tile(16, 64, 4, 2)), (128, Tile(16, 32, 4, 2)),
    (256, Tile(16, 16, 4, 2)),
  ),
  ("mosaic_tpu", 2): ((256, Tile(16, 1024)),),
  ("mosaic_tpu", 4): ((256, Tile(16, 512)),),
}  # fmt: skip
# Heads with fewer tokens than this get blocks of half the rows: a head's last
# block is half empty on average, which costs more the fewer blocks there are.
_FEW_ROWS = {"triton": 512, "mosaic_gpu": 512, "mosaic_tpu": 768}


def block_sizes(
  backend: str,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  per_head: int | None = None,
) -> BlockSizes:
  """Looks up the tiles for the device that a program is traced for.

  Args:
    backend: of Pallas, "triton", "mosaic_gpu" or "mosaic_tpu".
    head_dim: D, at most 256.
    dtype: dtype of the queries.
    per_head: tokens that a head has on average (N * active heads / H): blocks
      get smaller where these are few. None keeps the blocks as they are.

  Returns:
    Measured sizes if the file of the environment has them, else the defaults.

  Raises:
    ValueError: the head dim is too large.
  """
  dtype = jnp.dtype(dtype)
  sizes = measured().get(Key(backend, target().kind, head_dim, dtype.name))
  if sizes is None:
    sizes = BlockSizes(*_default(_DEFAULTS, backend, head_dim, dtype))
  if per_head is not None and per_head < _FEW_ROWS[backend]:
    smallest = 128 if backend == "mosaic_tpu" else 64
    sizes = sizes.with_rows(max(min(smallest, sizes.rows), sizes.rows // 2))
  return sizes


def decode_tile(
  backend: str, head_dim: int, dtype: jax.typing.DTypeLike
) -> Tile:
  """Looks up the tile for attention of one new token to a cache.

  Args:
    backend: of Pallas, "triton" or "mosaic_tpu".
    head_dim: D, at most 256.
    dtype: dtype of the products of queries and keys.

  Returns:
    The tile; it may have more rows than the token has query heads.

  Raises:
    ValueError: the head dim is too large.
  """
  return _default(_DECODE, backend, head_dim, jnp.dtype(dtype))[0]


def _default(
  tables: dict, backend: str, head_dim: int, dtype: jnp.dtype
) -> tuple[Tile, ...]:
  table = tables[backend, max(2, min(4, dtype.itemsize))]
  tiles = next((x[1:] for x in table if head_dim <= x[0]), None)
  if tiles is None:
    raise ValueError(f"head_dim={head_dim} must be at most {table[-1][0]}")
  return tiles


def read(path: str | os.PathLike) -> dict[Key, BlockSizes]:
  """Reads a file of measured sizes, as `speed.tiles.write` writes it.

  Args:
    path: a JSON list with one entry per `Key`.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is not such a file, or its tiles would give wrong results.
  """
  # Layers and kernels need no library but JAX and Flax.
  from moh_jax.json_files import read_json

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
  if backend not in _FEW_ROWS:
    raise ValueError(f"backend={backend!r} must be one of {list(_FEW_ROWS)}")
  if not 1 <= dim <= MAX_HEAD_DIM:
    raise ValueError(f"head_dim={dim!r} must be in [1, {MAX_HEAD_DIM}]")
  tiles = {}
  for name in ("forward", "dq", "dkv"):
    try:
      tiles[name] = Tile(**entry[name])
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}: {error}") from None
  sizes = BlockSizes(**tiles)
  sizes.check(backend)
  dtype = jnp.dtype(entry["dtype"]).name
  return Key(backend, str(entry["device"]), dim, dtype), sizes


@functools.cache
def measured() -> dict[Key, BlockSizes]:
  """Reads the file that MOH_JAX_BLOCK_SIZES names, once; empty without it."""
  path = os.environ.get(FILE_VARIABLE)
  return read(path) if path else {}
