"""Products with weights, stored input-major or output-major."""

import flax.linen as nn
import jax
import jax.numpy as jnp


def product(
  spec: str, x: jax.Array, kernel: jax.Array, *, output_major: bool
) -> jax.Array:
  """An einsum of activations and weights in the dtype of x.

  Weights are output-major where they are served from: every output reads one
  row, and a float32 result keeps bfloat16 products on the CPU's matrix units
  (XLA's other form of them is four times slower there). Give them as a matrix:
  with several axes of outputs the CPU transposes first.

  Args:
    spec: of the einsum.
    x: activations.
    kernel: weights, of the same dtype.
    output_major: how they are stored.
  """
  if not output_major:
    return jnp.einsum(spec, x, kernel)
  out = jnp.einsum(spec, x, kernel, preferred_element_type=jnp.float32)
  return out.astype(x.dtype)


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
    shape, axes, spec = (x.shape[-1], self.features), self.axes, "...c,cf->...f"
    if self.output_major:
      shape, axes, spec = shape[::-1], axes[::-1], "...c,fc->...f"
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(self.kernel_init, axes),
      shape,
      self.param_dtype,
    )
    x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    out = product(spec, x, kernel, output_major=self.output_major)
    if self.use_bias:
      bias = self.param(
        "bias",
        nn.with_logical_partitioning(nn.initializers.zeros, self.axes[1:]),
        (self.features,),
        self.param_dtype,
      )
      out = out + bias.astype(out.dtype)
    return out
