"""Feed-forward layers, and embeddings of tokens, labels and image patches.

Shapes: B batch, N tokens, C width, F hidden width, X and Y rows and columns.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.linear import (
  LINEAR_INIT,
  KernelInit,
  Linear,
  add_bias,
  normal_init,
)
from moh_jax.layers.partitioning import constrain, declare, with_axes
from moh_jax.ops.basics import gelu
from moh_jax.ops.window import depthwise_conv

_KERNEL = 3
# The backward pass keeps the inputs alone, and computes again what lies between
# them and the result: arrays of the hidden width too, but cheap ones.
_gelu = jax.checkpoint(nn.gelu)
_gated_gelu = jax.checkpoint(lambda gate, up: gelu(gate) * up)
_gated_silu = jax.checkpoint(lambda gate, up: nn.silu(gate) * up)


class MLP(nn.Module):
  """down(gelu(up(x))), or gated (arXiv:2002.05202) down(silu(gate(x)) * up(x)).

  GELU has its tanh form.

  Attributes:
    hidden_dim: F.
    gated: which of both.
    use_bias: add learned biases.
    output_major: how the kernels are stored, see `KernelLayer`.
    kernel_init: initializer of the kernels.
    down_init: that of the kernel of `down`; None is the same.
    dtype: compute dtype.
  """

  hidden_dim: int
  gated: bool = False
  use_bias: bool = True
  output_major: bool = False
  kernel_init: KernelInit = normal_init
  down_init: KernelInit | None = None
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, N, C] to [B, N, C]."""
    kinds = {
      "use_bias": self.use_bias,
      "output_major": self.output_major,
      "kernel_init": self.kernel_init,
      "dtype": self.dtype,
    }
    wide = ("embed", "mlp")
    up = functools.partial(Linear, self.hidden_dim, wide, **kinds)
    if self.gated:
      hidden = _gated_silu(up(name="gate")(x), up(name="up")(x))
    else:
      hidden = _gelu(up(name="up")(x))
    hidden = constrain(hidden, "batch", "tokens", "mlp")
    kinds["kernel_init"] = self.down_init or self.kernel_init
    down = Linear(x.shape[-1], wide[::-1], name="down", **kinds)
    return constrain(down(hidden), "batch", "tokens", None)


class ConvGLU(nn.Module):
  """Convolutional gated linear unit of TransNeXt (arXiv:2311.17132).

  out(gelu(depthwise(gate(x))) * value(x)), GELU exact.

  Attributes:
    hidden_dim: F.
    grid: rows and columns of the tokens.
    dtype: compute dtype.
  """

  hidden_dim: int
  grid: tuple[int, int]
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, N, C] to [B, N, C]."""
    batch, tokens, channels = x.shape
    wide, kinds = ("embed", "mlp"), {"dtype": self.dtype}
    gate = Linear(self.hidden_dim, wide, name="gate", **kinds)(x)
    value = Linear(self.hidden_dim, wide, name="value", **kinds)(x)
    gate = constrain(gate, "batch", "tokens", "mlp")
    value = constrain(value, "batch", "tokens", "mlp")

    gate = gate.reshape(batch, *self.grid, self.hidden_dim)
    gate = DepthwiseConv(name="dwconv", dtype=self.dtype)(gate)
    gate = gate.reshape(batch, tokens, self.hidden_dim)
    hidden = _gated_gelu(gate, value)
    out = Linear(channels, wide[::-1], name="out", **kinds)
    return constrain(out(hidden), "batch", "tokens", None)


class DepthwiseConv(nn.Module):
  """3x3 depthwise convolution with bias and zero padding.

  Attributes:
    dtype: compute dtype.
  """

  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, F] to [B, X, Y, F]."""
    features = x.shape[-1]
    # Variance 2 / fan_out; with a group per channel, fan_out is the 3 x 3
    # window alone.
    init = nn.initializers.normal((2.0 / _KERNEL**2) ** 0.5)
    shape, axes = (_KERNEL, _KERNEL, features), (None, None, "mlp")
    kernel = declare(self, "kernel", init, shape, axes)
    bias = declare(self, "bias", nn.initializers.zeros, (features,), ("mlp",))
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    return add_bias(depthwise_conv(x, kernel), bias)


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
  """

  rows: int
  width: int
  axes: tuple[str | None, str | None]

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns the table [rows, C] float32."""
    shape = (self.rows, self.width)
    return declare(self, "embedding", LINEAR_INIT, shape, self.axes)


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
