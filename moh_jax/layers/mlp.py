"""Feed-forward layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.linear import Linear
from moh_jax.layers.moh import LINEAR_INIT, xavier_init
from moh_jax.layers.partitioning import constrain
from moh_jax.ops.activation import gelu
from moh_jax.ops.window import depthwise_conv

_KERNEL = 3


class MLP(nn.Module):
  """Two linear layers with the tanh form of GELU between them.

  Attributes:
    hidden_dim: F.
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  hidden_dim: int
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, N, C] to [B, N, C]."""
    kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
    up = nn.with_logical_partitioning(xavier_init(0, 1), ("embed", "mlp"))
    hidden = nn.Dense(self.hidden_dim, kernel_init=up, name="up", **kinds)(x)
    hidden = constrain(nn.gelu(hidden), "batch", None, "mlp")
    down = nn.with_logical_partitioning(xavier_init(0, 1), ("mlp", "embed"))
    out = nn.Dense(x.shape[-1], kernel_init=down, name="down", **kinds)(hidden)
    return constrain(out, "batch", None, None)


class SwiGLU(nn.Module):
  """Gated MLP (arXiv:2002.05202): down(silu(gate(x)) * up(x)).

  Attributes:
    hidden_dim: F.
    use_bias: add learned biases.
    output_major: how the kernels are stored, see `Linear`.
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  hidden_dim: int
  use_bias: bool = False
  output_major: bool = False
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, N, C] to [B, N, C]."""
    kinds = {
      "kernel_init": LINEAR_INIT,
      "use_bias": self.use_bias,
      "output_major": self.output_major,
      "dtype": self.dtype,
      "param_dtype": self.param_dtype,
    }
    wide = ("embed", "mlp")
    gate = Linear(self.hidden_dim, wide, name="gate", **kinds)(x)
    up = Linear(self.hidden_dim, wide, name="up", **kinds)(x)
    hidden = constrain(nn.silu(gate) * up, "batch", None, "mlp")
    down = Linear(x.shape[-1], wide[::-1], name="down", **kinds)
    return constrain(down(hidden), "batch", None, None)


class ConvGLU(nn.Module):
  """Convolutional gated linear unit of TransNeXt (arXiv:2311.17132).

  out(gelu(depthwise(gate(x))) * value(x)), GELU exact.

  Attributes:
    hidden_dim: F.
    grid: rows and columns of the tokens.
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  hidden_dim: int
  grid: tuple[int, int]
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, N, C] to [B, N, C]."""
    batch, tokens, channels = x.shape
    kinds = {"dtype": self.dtype, "param_dtype": self.param_dtype}
    up = nn.with_logical_partitioning(LINEAR_INIT, ("embed", "mlp"))
    gate = nn.Dense(self.hidden_dim, kernel_init=up, name="gate", **kinds)(x)
    value = nn.Dense(self.hidden_dim, kernel_init=up, name="value", **kinds)(x)
    gate = constrain(gate, "batch", None, "mlp")
    value = constrain(value, "batch", None, "mlp")

    gate = gate.reshape(batch, *self.grid, self.hidden_dim)
    gate = DepthwiseConv(name="dwconv", **kinds)(gate)
    gate = gate.reshape(batch, tokens, self.hidden_dim)
    hidden = gelu(gate) * value

    down = nn.with_logical_partitioning(LINEAR_INIT, ("mlp", "embed"))
    out = nn.Dense(channels, kernel_init=down, name="out", **kinds)(hidden)
    return constrain(out, "batch", None, None)


class DepthwiseConv(nn.Module):
  """3x3 depthwise convolution with bias and zero padding.

  Attributes:
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, F] to [B, X, Y, F]."""
    features = x.shape[-1]
    # fan_out of one group is the 3 x 3 window alone.
    init = nn.initializers.normal((2.0 / _KERNEL**2) ** 0.5)
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(init, (None, None, "mlp")),
      (_KERNEL, _KERNEL, features),
      self.param_dtype,
    )
    bias = self.param(
      "bias",
      nn.with_logical_partitioning(nn.initializers.zeros, ("mlp",)),
      (features,),
      self.param_dtype,
    )
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    return depthwise_conv(x, kernel) + bias
