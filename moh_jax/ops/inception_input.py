"""The two published ways to resize and scale pixels for the FID Inception."""

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.dit import RESIZES

INPUT_SIZE = 299


def prepare(
  images: jax.Array, resize: str = "tf1", size: int = INPUT_SIZE
) -> jax.Array:
  """Resizes and scales pixels to the network's input.

  Neither way antialiases, or rounds resized pixels to integers.

  Args:
    images: [B, X, Y, 3] uint8 pixels (or their values in float32).
    resize: "tf1", TensorFlow 1's bilinear rule without half-pixel centres, then
      (x - 128) / 128, which published ADM and DiT numbers use; "ptfid",
      half-pixel centres, then 2 x / 255 - 1, as in pytorch-fid.
    size: rows and columns of the result.

  Returns:
    [B, size, size, 3] float32.

  Raises:
    ValueError: an unknown resize.
  """
  if resize not in RESIZES:
    raise ValueError(f"resize={resize!r} must be one of {RESIZES}")
  x = images.astype(jnp.float32)
  x = x / 255 if resize == "ptfid" else x
  # Columns first, then rows: TensorFlow's kernel rounds in this order.
  for axis in (2, 1):
    x = _interpolate(x, axis, size, half_pixel=resize == "ptfid")
  return 2 * x - 1 if resize == "ptfid" else (x - 128) / 128


def _interpolate(
  x: jax.Array, axis: int, size: int, *, half_pixel: bool
) -> jax.Array:
  """Resizes one axis by linear interpolation of the two nearest pixels."""
  length = x.shape[axis]
  # The public implementations compute coordinates in float32.
  step = np.float32(length) / np.float32(size)
  source = np.arange(size, dtype=np.float32)
  if half_pixel:
    half = np.float32(0.5)
    source = np.maximum((source + half) * step - half, np.float32(0))
  else:
    source = source * step
  low = np.minimum(np.floor(source).astype(np.int32), length - 1)
  high = np.minimum(low + 1, length - 1)
  weight = np.expand_dims(source - low, [i for i in range(x.ndim) if i != axis])
  below = jnp.take(x, low, axis)
  return below + (jnp.take(x, high, axis) - below) * weight
