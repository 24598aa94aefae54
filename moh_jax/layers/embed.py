"""Embedding of tokens, labels and image patches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.linear import LINEAR_INIT
from moh_jax.layers.partitioning import declare, with_axes

# Normal with variance 2 / fan_out, as the convolutions of the released ViT.
CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
# The variance of centred values: E[x^2] - E[x]^2 would lose digits.
LayerNorm = functools.partial(nn.LayerNorm, use_fast_variance=False)


class Table(nn.Module):
  """A learned vector for every token or label.

  Attributes:
    rows: tokens or labels.
    width: C.
    axes: logical names of both dimensions.
    init: initializer.
  """

  rows: int
  width: int
  axes: tuple[str | None, str | None]
  init: nn.initializers.Initializer = LINEAR_INIT

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns the table [rows, C] float32."""
    shape = (self.rows, self.width)
    return declare(self, "embedding", self.init, shape, self.axes)


class OverlapPatchEmbed(nn.Module):
  """Strided convolution whose patches overlap, then LayerNorm.

  Attributes:
    features: C, width of a token.
    kernel_size: odd width of a patch.
    stride: distance between patches.
    dtype: compute dtype.
  """

  features: int
  kernel_size: int
  stride: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Maps [B, X, Y, channels] to [B, ceil(X / s), ceil(Y / s), C]."""
    x = nn.Conv(
      self.features,
      (self.kernel_size, self.kernel_size),
      strides=self.stride,
      padding=self.kernel_size // 2,
      kernel_init=with_axes(CONV_INIT, (None, None, None, "embed")),
      name="proj",
      dtype=self.dtype,
    )(images)
    return LayerNorm(epsilon=1e-5, name="norm", dtype=self.dtype)(x)


def check_shape(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
  """Raises ValueError unless an input is [batch, *shape]; `name` is its own."""
  if x.ndim != 1 + len(shape) or x.shape[1:] != shape:
    raise ValueError(
      f"{name} of shape {x.shape} must be [batch, {', '.join(map(str, shape))}]"
    )
