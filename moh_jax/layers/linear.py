"""Products with weights, stored input-major or output-major."""

import flax.linen as nn
import jax
import jax.numpy as jnp

# With fewer the CPU reads the weights up to twice as fast as the left operand.
_MANY_ROWS = 128


def product(
  x: jax.Array,
  matrix: jax.Array,
  *,
  output_major: bool = False,
  dtype: jnp.dtype | None = None,
) -> jax.Array:
  """Activations times a matrix, as one product of two matrices.

  With more axes XLA on the CPU copies operands of the backward pass into
  another order first, at the cost of the product itself.

  Weights are output-major where they are served from: every output reads one
  row, and a float32 result keeps bfloat16 products on the CPU's matrix units
  (XLA's other form of them is four times slower there).

  Args:
    x: [..., C].
    matrix: [C, F], or [F, C] where output-major; of the dtype of x.
    output_major: how it is stored.
    dtype: of the result; None is that of x.

  Returns:
    [..., F].
  """
  rows = x.reshape(-1, x.shape[-1])
  if output_major and len(rows) < _MANY_ROWS:
    out = jnp.einsum(
      "fc,rc->fr", matrix, rows, preferred_element_type=jnp.float32
    )
    # Without the barrier XLA merges the transposition into the product.
    out = jax.lax.optimization_barrier(out).T
  elif output_major:
    out = jnp.einsum(
      "rc,fc->rf", rows, matrix, preferred_element_type=jnp.float32
    )
  else:
    out = rows @ matrix
  return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], -1)


class Linear(nn.Module):
  """A linear layer that can be stored output-major.

  Attributes:
    features: width of the result.
    axes: logical axes of the input and the output.
    kernel_init: of the kernel.
    use_bias: add a learned bias.
    output_major: the kernel is [outputs, inputs], else [inputs, outputs].
    dtype: compute dtype.
    param_dtype: storage dtype.
  """

  features: int
  axes: tuple[str | None, str | None]
  kernel_init: nn.initializers.Initializer
  use_bias: bool = True
  output_major: bool = False
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., C] to [..., features]."""
    shape, axes = (x.shape[-1], self.features), self.axes
    if self.output_major:
      shape, axes = shape[::-1], axes[::-1]
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(self.kernel_init, axes),
      shape,
      self.param_dtype,
    )
    x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    out = product(x, kernel, output_major=self.output_major)
    if self.use_bias:
      bias = self.param(
        "bias",
        nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:]),
        (self.features,),
        self.param_dtype,
      )
      out = out + bias.astype(out.dtype)
    return out
