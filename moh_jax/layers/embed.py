"""Embedding of image patches as tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.partitioning import with_axes

# Normal with variance 2 / fan_out, as the convolutions of the released ViT.
CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


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
    return nn.LayerNorm(
      epsilon=1e-5, use_fast_variance=False, name="norm", dtype=self.dtype
    )(x)
