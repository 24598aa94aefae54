"""Positions of tokens: relative coordinates, sines and cosines, rotations."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.llm import RotaryConfig
from moh_jax.ops.lanes import on_tpu, rotate_in_lanes


class RelativeCoordinates(NamedTuple):
  """Relative (row, column) coordinates of every query and key on a grid.

  Many pairs have the same coordinates, so the MLP that turns coordinates to
  biases runs on the distinct ones alone.

  Attributes:
    table: [T, 2] float32 distinct coordinates, log-spaced.
    index: [N, M] int32 row of the table for each query and key.
  """

  table: np.ndarray | jax.Array
  index: np.ndarray | jax.Array


def pooling_bins(size: int, bins: int) -> np.ndarray:
  """Matrix of adaptive average pooling along one axis.

  Bin i averages the positions from floor(i * size / bins) up to, but without,
  ceil((i + 1) * size / bins). Bins overlap where bins does not divide size: 5
  positions in 2 bins are 0 to 2 and 2 to 4.

  Args:
    size: number of positions.
    bins: number of averages, 1 <= bins <= size.

  Returns:
    [bins, size] float64, rows sum to 1.
  """
  edges = np.arange(bins + 1) * size
  starts, stops = edges[:-1] // bins, -(-edges[1:] // bins)
  position = np.arange(size)
  inside = (position >= starts[:, None]) & (position < stops[:, None])
  return inside / inside.sum(1, keepdims=True)


def relative_coordinates(
  query_grid: tuple[int, int],
  key_grid: tuple[int, int],
  pretrain_grid: tuple[int, int] | None = None,
) -> RelativeCoordinates:
  """Log-spaced relative coordinates of TransNeXt (arXiv:2311.17132).

  Along each axis it is sign(d) log2(1 + |d|) / 3 with
  d = (query - key) / (pretrain size - 1) * 8. The position of a pooled key is
  the mean of its bin's positions.

  Args:
    query_grid: rows and columns of the queries.
    key_grid: rows and columns of the keys, at most the query grid.
    pretrain_grid: query grid that the model was pre-trained with; None is
      `query_grid`. An axis of size 1 has only the coordinate 0.

  Returns:
    The distinct coordinates and, for every pair, the row that holds its own.
  """
  pretrain_grid = pretrain_grid or query_grid
  tables, indices = [], []
  for size, keys, pretrain in zip(query_grid, key_grid, pretrain_grid):
    positions = np.arange(size, dtype=np.float64)
    key_positions = pooling_bins(size, keys) @ positions
    offset = positions[:, None] - key_positions[None, :]
    # Means of bins have rounding errors: without this, equal offsets differ.
    distinct, index = np.unique(np.round(offset, 6), return_inverse=True)
    scaled = distinct / max(pretrain - 1, 1) * 8
    tables.append(np.sign(scaled) * np.log2(1 + np.abs(scaled)) / 3)
    indices.append(index.reshape(size, keys))

  rows, columns = tables
  table = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)
  # [X, 1, KX, 1] and [1, Y, 1, KY] -> [X, Y, KX, KY]
  index = (
    indices[0][:, None, :, None] * len(columns) + indices[1][None, :, None, :]
  )
  queries, keys = int(np.prod(query_grid)), int(np.prod(key_grid))
  return RelativeCoordinates(
    table=table.reshape(-1, 2).astype(np.float32),
    index=index.reshape(queries, keys).astype(np.int32),
  )


def sincos_2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Fixed sine-cosine position table of a token grid (arXiv:2212.09748).

  Args:
    grid: rows and columns.
    width: C, a multiple of 4.

  Returns:
    [N, C] float32, tokens row by row. The first half of C encodes the column,
    the second the row; within a half, sines come first.
  """
  frequencies = 10000.0 ** -(np.arange(width // 4) / (width / 4))
  rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
  halves = []
  for place in (columns, rows):
    angles = np.outer(place, frequencies)
    halves += [np.sin(angles), np.cos(angles)]
  return np.concatenate(halves, axis=1).astype(np.float32)


def sinusoidal(t: jax.Array, width: int) -> jax.Array:
  """Sinusoidal features of timesteps (arXiv:1706.03762), cosines first.

  Args:
    t: [B] timesteps, integer or not.
    width: an even number of features.

  Returns:
    [B, width] float32.
  """
  half = width // 2
  exponents = -np.log(10000.0) * np.arange(half, dtype=np.float32) / half
  frequencies = np.exp(exponents).astype(np.float32)
  angles = t.astype(jnp.float32)[:, None] * frequencies[None]
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Rotation(NamedTuple):
  """Cosines and sines of the angles that RoPE rotates tokens by.

  With "yarn" both are multiplied by its attention factor.

  Attributes:
    cos: [B, N, D / 2] float32.
    sin: [B, N, D / 2] float32.
  """

  cos: jax.Array
  sin: jax.Array


def rotation(
  positions: jax.Array,
  config: RotaryConfig,
  dim: int,
  token_mask: jax.Array | None = None,
  segments: jax.Array | None = None,
) -> Rotation:
  """Computes the angles of tokens from their positions.

  Args:
    positions: [B, N] int32.
    config: the rotary embedding. The base of "dynamic" depends on the largest
      position of the document. Keys in a cache keep the base of their own step.
    dim: D, width of a head, even.
    token_mask: [B, N] bool, False for padding, whose positions are ignored by
      "dynamic".
    segments: [B, N] int32, the document of each token, in runs of equal
      numbers; None is one document a row.

  Returns:
    Cosines and sines of the angles.
  """
  exponents = np.arange(0, dim, 2, dtype=np.float32) / dim
  angle_at = positions[..., None].astype(jnp.float32)
  if config.scaling == "dynamic":
    real = positions if token_mask is None else positions * token_mask
    longest = real.max(-1, keepdims=True)
    if segments is not None:
      runs = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
      document = jnp.cumsum(runs, axis=1)  # from 0, whatever the numbers are
      longest = jax.vmap(
        lambda p, d: jax.ops.segment_max(p, d, num_segments=d.size)[d]
      )(real, document)
    longest = longest[..., None] + 1
    longest = jnp.maximum(longest, config.original_length)
    stretch = config.factor * longest / config.original_length
    stretch = stretch - (config.factor - 1)
    theta = config.theta * stretch ** (dim / max(dim - 2, 1))
    angles = angle_at / theta ** exponents[None, None]
  else:
    frequencies = 1.0 / np.float32(config.theta) ** exponents
    frequencies = _scaled_frequencies(frequencies, config)
    angles = angle_at * frequencies[None, None]
  by = Rotation(jnp.cos(angles), jnp.sin(angles))
  if config.scaling != "yarn":
    return by
  factor = config.attention_factor
  if factor is None:
    factor = 0.1 * np.log(config.factor) + 1
  return jax.tree.map(lambda x: x * np.float32(factor), by)


def _scaled_frequencies(
  frequencies: np.ndarray, config: RotaryConfig
) -> np.ndarray:
  if config.scaling == "none":
    return frequencies
  slow = frequencies / config.factor
  if config.scaling == "linear":
    return slow
  # The share is 0 for long wavelengths (low frequencies), 1 for short ones.
  if config.scaling == "yarn":
    share = _yarn_share(len(frequencies), config)
  else:
    turns = config.original_length * frequencies / (2 * np.pi)
    span = config.high_freq_factor - config.low_freq_factor
    share = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
  mixed = (1 - share) * slow + share * frequencies
  return mixed.astype(np.float32)


def _yarn_share(pairs: int, config: RotaryConfig) -> np.ndarray:
  """Share [pairs] of each pair's own frequency: a ramp from 1 down to 0."""

  def pair_with(turns: float) -> float:
    """Number of the pair that turns so often in the original length."""
    wavelength = config.original_length / turns
    return pairs * math.log(wavelength / (2 * math.pi), config.theta)

  first, last = pair_with(config.beta_fast), pair_with(config.beta_slow)
  if config.truncate:
    first, last = math.floor(first), math.ceil(last)
  # As published: the upper bound is the head's width, not its pairs.
  first, last = max(first, 0), min(last, 2 * pairs - 1)
  span = last - first or 1e-3
  return 1 - np.clip((np.arange(pairs) - first) / span, 0.0, 1.0)


def rotate(x: jax.Array, by: Rotation, count: int = 1) -> jax.Array:
  """Rotates the pairs (i, i + D / 2) of queries or keys.

  Args:
    x: [B, N, H, D]; on a TPU possibly wider, with zeros after the first D.
    by: angles of the tokens, from `rotation`.
    count: heads that a TPU keeps side by side (`ops.lanes`).

  Returns:
    The shape and dtype of x; computed in float32.
  """
  if on_tpu():
    return rotate_in_lanes(x, by.cos, by.sin, count)
  cos, sin = by.cos[:, :, None], by.sin[:, :, None]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
