"""Sizes of the kernels' tiles.

By default they are chosen by what the compilers report: on GPUs tiles that fit
the registers and 99 KiB of shared memory, which every GPU since Ampere has, and
on TPUs tiles whose schedule keeps the matrix units busiest.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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

  @classmethod
  def of(cls, *tiles: tuple[int, ...]) -> "BlockSizes":
    """The tiles of the three kernels, from the numbers of each."""
    return cls(*(Tile(*tile) for tile in tiles))

  @property
  def rows(self) -> int:
    """R, the rows that `head_blocks` should give its blocks."""
    return self.forward.rows

  def check_covers(self) -> None:
    """Checks that tiles of the gradients cover a block exactly.

    Raises:
      ValueError: the rows of dq or dkv do not divide R. A block's last rows
        would be in no tile, so in no gradient.
    """
    for name in ("dq", "dkv"):
      if self.rows % (rows := getattr(self, name).rows):
        raise ValueError(
          f"{name}.rows={rows} must divide forward.rows={self.rows}"
        )

  def with_rows(self, rows: int) -> "BlockSizes":
    """Returns the sizes for a table whose blocks have this many rows."""
    forward = dataclasses.replace(self.forward.cut(rows), rows=rows)
    # This kernel loops over rows and its warps share the keys: as many stay.
    dkv = dataclasses.replace(self.dkv, rows=min(self.dkv.rows, rows))
    return BlockSizes(forward, self.dq.cut(rows), dkv)


def fitting(
  table: dict[int, dict[int, Any]],
  head_dim: int,
  dtype: jax.typing.DTypeLike,
) -> Any:
  """Looks up the default sizes of a back end.

  Args:
    table: by bytes of a number, 2 or 4, and largest head dim.
    head_dim: D.
    dtype: of the queries.

  Raises:
    ValueError: the head dim is too large.
  """
  sizes = table[max(2, min(4, jnp.dtype(dtype).itemsize))]
  if head_dim > max(sizes):
    raise ValueError(f"head_dim={head_dim} must be at most {max(sizes)}")
  return sizes[min(x for x in sizes if head_dim <= x)]
