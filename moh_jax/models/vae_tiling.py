"""Encodes and decodes large images with the autoencoder, tile by tile.

All tiles have the same shape, so one compiled program serves them, and the
device holds one tile at a time. Neighbouring tiles overlap and are blended
linearly. Norms and attention see one tile only, so with several tiles the
result differs a little from that of the whole image.
"""

import fractions
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def apply_tiled(
  apply_fn: Callable[[np.ndarray], Any],
  array: np.ndarray,
  tile: int,
  overlap: int,
) -> Any:
  """Encodes images, or decodes latents, of any size in the memory of one tile.

  Args:
    apply_fn: encodes or decodes [B, t, t, channels]; should be jitted. Its
      results may be a pytree, such as mean and log variance.
    array: [B, X, Y, channels] images in [-1, 1], or latents, not scaled.
    tile: side of a tile in positions of the array; smaller arrays are one tile.
    overlap: positions that neighbouring tiles share at least.

  Returns:
    What `apply_fn` would give for the whole array, [B, x, y, channels] float32
    on the host; exactly that if one tile is enough.

  Raises:
    ValueError: overlap is not below tile, or several tiles are needed and one
      of tile, overlap, X and Y is not a multiple of the positions that become
      one in the result (the config's `downscale` for an encoder).
  """
  if not 0 <= overlap < tile:
    raise ValueError(f"overlap={overlap} must be in [0, tile={tile})")
  array = np.asarray(array)
  sides = array.shape[1:3]
  shape = tuple(min(tile, side) for side in sides)

  def run(row: int, column: int) -> Any:
    part = array[:, row : row + shape[0], column : column + shape[1]]
    return jax.tree.map(lambda y: np.asarray(y, np.float32), apply_fn(part))

  first = run(0, 0)
  if shape == sides:
    return first
  # `step` positions of the input become `scale` of the output.
  height = jax.tree.leaves(first)[0].shape[1]
  scale, step = fractions.Fraction(height, shape[0]).as_integer_ratio()
  if any(size % step for size in (*sides, tile, overlap)):
    raise ValueError(
      f"sides {sides}, tile={tile} and overlap={overlap} must be multiples of "
      f"{step}"
    )
  rows, columns = (
    _spans(side // step, size // step, overlap // step, scale)
    for side, size in zip(sides, shape)
  )
  whole = [side // step * scale for side in sides]
  total = jax.tree.map(
    lambda y: np.zeros((len(y), *whole, y.shape[-1]), np.float32), first
  )
  for row, down in rows:
    for column, across in columns:
      at = row * step, column * step
      part = run(*at) if any(at) else first
      weight = down[:, None, None] * across[:, None]
      window = (
        slice(None),
        slice(row * scale, row * scale + len(down)),
        slice(column * scale, column * scale + len(across)),
      )
      for out, y in zip(jax.tree.leaves(total), jax.tree.leaves(part)):
        out[window] += weight * y
  return total


def _spans(
  side: int, tile: int, overlap: int, scale: int
) -> list[tuple[int, np.ndarray]]:
  """Spreads tiles evenly along one axis.

  Args:
    side: length of the axis.
    tile: length of a tile, at most `side`.
    overlap: positions that neighbours share at least.
    scale: output positions per input position.

  Returns:
    For each tile its start and its weights [tile * scale] at the output's
    positions. The weights of all tiles sum to 1 at every position.
  """
  gaps = -(-(side - tile) // (tile - overlap))
  starts = [i * (side - tile) // max(gaps, 1) for i in range(gaps + 1)]
  positions = (np.arange(side * scale) + 0.5) / scale
  # For each tile, a ramp from 0 (before the tile) to 1 (inside it or after it)
  # in the middle of its overlap with the tile before. Ramps are no longer than
  # the distance of two tiles' centres, so that no position mixes three tiles.
  passed = [np.ones_like(positions)]
  for start, after in itertools.pairwise(starts):
    middle = (start + tile + after) / 2
    length = min(start + tile - after, after - start)
    offset = positions - middle
    ramp = offset / length + 0.5 if length else offset > 0
    passed.append(np.clip(ramp, 0.0, 1.0))
  passed.append(np.zeros_like(positions))
  weights = -np.diff(passed, axis=0)
  return [
    (start, weight[start * scale : (start + tile) * scale].astype(np.float32))
    for start, weight in zip(starts, weights)
  ]
