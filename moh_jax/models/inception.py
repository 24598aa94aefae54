"""The Inception-v3 that FID is defined with.

The network of 2015 that openai/guided-diffusion's evaluator runs: average
pooling that ignores padding, a max pooling in the last block, 1008 outputs, no
auxiliary head (arXiv:1512.00567 and arXiv:1706.08500). Inference only. Pixels
are resized and scaled for it in one of two published ways.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

INPUT_SIZE = 299
POOL_DIM = 2048
SPATIAL_DIM = 2023  # 17 x 17 positions x 7 channels, channel fastest
_SPATIAL_CHANNELS = 7
_CLASSES = 1008  # of which 1,000 are in use
_EPSILON = 1e-3  # of BatchNorm
# Kernels of a factorized 7 x 7 convolution.
_ROW, _COLUMN = (1, 7), (7, 1)
_HALVE = (3, 3), 2, "VALID"  # kernel, stride and padding


class Features(NamedTuple):
  """The outputs that metrics use.

  Attributes:
    pool3: [B, 2048] average of the last block, the FID feature.
    spatial: [B, 17, 17, 7] first channels of Mixed_6d, the sFID feature.
    logits: [B, 1008] class scores without the class bias.
  """

  pool3: jax.Array
  spatial: jax.Array
  logits: jax.Array


class Unit(NamedTuple):
  """Shape of a `ConvUnit`: name in checkpoints, width, kernel and stride."""

  name: str
  features: int
  kernel: tuple[int, int] = (1, 1)
  stride: int = 1
  padding: str = "SAME"


# A branch is a sequence of units and poolings. Units in a tuple of their own
# read the same input, and their outputs are concatenated.
Branch = tuple[Unit | str | tuple[Unit, ...], ...]


class ConvUnit(nn.Module):
  """Convolution without bias, BatchNorm with stored statistics, ReLU."""

  unit: Unit

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, channels] to [B, X', Y', features]."""
    unit, width = self.unit, (self.unit.features,)
    shape = (*unit.kernel, x.shape[-1], unit.features)
    kernel = self.param("kernel", nn.initializers.he_normal(), shape)
    scale, bias, mean, var = (
      self.param(name, nn.initializers.ones, width)
      for name in ("scale", "bias", "mean", "var")
    )
    x = jax.lax.conv_general_dilated(
      x,
      kernel,
      (unit.stride, unit.stride),
      unit.padding,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      # Metrics from 16-bit products would differ from published ones.
      precision=jax.lax.Precision.HIGHEST,
    )
    scale = scale / jnp.sqrt(var + _EPSILON)
    mean, scale, bias = (y[None, None, None] for y in (mean, scale, bias))
    return nn.relu((x - mean) * scale + bias)


class Mixed(nn.Module):
  """Parallel branches, concatenated along the channels in their order."""

  branches: tuple[Branch, ...]

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, channels] to [B, X', Y', the branches' widths]."""
    outputs = []
    for branch in self.branches:
      y = x
      for step in branch:
        if isinstance(step, str):
          y = _pool(step, y)
        else:
          units = (step,) if isinstance(step, Unit) else step
          parts = [ConvUnit(u, name=u.name)(y) for u in units]
          y = jnp.concatenate(parts, -1)
      outputs.append(y)
    return jnp.concatenate(outputs, -1)


class InceptionV3(nn.Module):
  """The feature network.

  With `mutable=["intermediates"]` it records the output of every block as
  `BLOCK_out`, and of the stem's poolings as `maxpool1_out` and `maxpool2_out`.
  """

  @nn.compact
  def __call__(self, x: jax.Array) -> Features:
    """Extracts features.

    Args:
      x: [B, X, Y, 3] float32, resized and scaled by `prepare`; X and Y of at
        least 75.
    """
    for step in _STEM:
      if isinstance(step, Unit):
        x = ConvUnit(step, name=step.name)(x)
        self.sow("intermediates", f"{step.name}_out", x)
      else:
        x = _pool("reduce", x)
        self.sow("intermediates", f"{step}_out", x)
    for name, branches in _BLOCKS.items():
      x = Mixed(branches, name=name)(x)
      self.sow("intermediates", f"{name}_out", x)
      if name == "Mixed_6d":  # its first branch is the evaluator's tensor
        spatial = x[..., :_SPATIAL_CHANNELS]
    pool3 = x.mean((1, 2))
    # The evaluator never adds the bias that checkpoints have.
    scores = nn.Dense(_CLASSES, use_bias=False, precision="highest", name="fc")
    return Features(pool3, spatial, scores(pool3))


def _pool(kind: str, x: jax.Array) -> jax.Array:
  """3 x 3 pooling: "avg" and "max" keep the size, "reduce" halves it."""
  if kind == "avg":
    return nn.avg_pool(
      x, (3, 3), (1, 1), padding="SAME", count_include_pad=False
    )
  if kind == "max":
    return nn.max_pool(x, (3, 3), (1, 1), padding="SAME")
  return nn.max_pool(x, (3, 3), (2, 2))


def _chain(name: str, *shapes: tuple) -> tuple[Unit, ...]:
  """Units NAME_1, NAME_2, ..., each of a shape as `Unit` takes it."""
  return tuple(
    Unit(f"{name}_{index}", *shape) for index, shape in enumerate(shapes, 1)
  )


def _mixed_35(pool: int) -> tuple[Branch, ...]:
  """A block of 35 x 35 positions."""
  return (
    (Unit("branch1x1", 64),),
    _chain("branch5x5", (48,), (64, (5, 5))),
    _chain("branch3x3dbl", (64,), (96, (3, 3)), (96, (3, 3))),
    ("avg", Unit("branch_pool", pool)),
  )


def _mixed_17(width: int) -> tuple[Branch, ...]:
  """A block of 17 x 17 positions with factorized 7 x 7 convolutions."""
  row, column = (width, _ROW), (width, _COLUMN)
  return (
    (Unit("branch1x1", 192),),
    _chain("branch7x7", (width,), row, (192, _COLUMN)),
    _chain("branch7x7dbl", (width,), column, row, column, (192, _ROW)),
    ("avg", Unit("branch_pool", 192)),
  )


def _mixed_8(pool: str) -> tuple[Branch, ...]:
  """A block of 8 x 8 positions whose 3 x 3 branches fork at their end."""

  def fork(name: str) -> tuple[Unit, ...]:
    return Unit(f"{name}a", 384, (1, 3)), Unit(f"{name}b", 384, (3, 1))

  return (
    (Unit("branch1x1", 320),),
    (Unit("branch3x3_1", 384), fork("branch3x3_2")),
    (*_chain("branch3x3dbl", (448,), (384, (3, 3))), fork("branch3x3dbl_3")),
    (pool, Unit("branch_pool", 192)),
  )


_STEM: tuple[Unit | str, ...] = (
  Unit("Conv2d_1a_3x3", 32, *_HALVE),
  Unit("Conv2d_2a_3x3", 32, (3, 3), 1, "VALID"),
  Unit("Conv2d_2b_3x3", 64, (3, 3)),
  "maxpool1",
  Unit("Conv2d_3b_1x1", 80),
  Unit("Conv2d_4a_3x3", 192, (3, 3), 1, "VALID"),
  "maxpool2",
)
_BLOCKS: dict[str, tuple[Branch, ...]] = {
  "Mixed_5b": _mixed_35(32),
  "Mixed_5c": _mixed_35(64),
  "Mixed_5d": _mixed_35(64),
  "Mixed_6a": (
    (Unit("branch3x3", 384, *_HALVE),),
    _chain("branch3x3dbl", (64,), (96, (3, 3)), (96, *_HALVE)),
    ("reduce",),
  ),
  "Mixed_6b": _mixed_17(128),
  "Mixed_6c": _mixed_17(160),
  "Mixed_6d": _mixed_17(160),
  "Mixed_6e": _mixed_17(192),
  "Mixed_7a": (
    _chain("branch3x3", (192,), (320, *_HALVE)),
    _chain("branch7x7x3", (192,), (192, _ROW), (192, _COLUMN), (192, *_HALVE)),
    ("reduce",),
  ),
  "Mixed_7b": _mixed_8("avg"),
  "Mixed_7c": _mixed_8("max"),
}


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
  """
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
  half = np.float32(0.5 if half_pixel else 0)
  source = (np.arange(size, dtype=np.float32) + half) * step - half
  source = np.maximum(source, np.float32(0))
  low = np.minimum(np.floor(source).astype(np.int32), length - 1)
  high = np.minimum(low + 1, length - 1)
  weight = np.expand_dims(source - low, [i for i in range(x.ndim) if i != axis])
  below = jnp.take(x, low, axis)
  return below + (jnp.take(x, high, axis) - below) * weight
