"""Linear layers: kernels input-major or output-major, and their adapters.

All products with large matrices go through a `KernelLayer`, but for
convolutions and the output layer of language models. An adapter (LoRA,
arXiv:2106.09685) adds (alpha / r) (x A) B to x W; `models.adapters` puts A, B
and the factor among the parameters, beside the kernel that they adapt.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.partitioning import (
  axes_of,
  constrain,
  declare,
  drop_elements,
)
from moh_jax.ops.basics import einsum_float32
from moh_jax.ops.lanes import HeadLayout, on_tpu
from moh_jax.ops.target import on_one_device

# With fewer the CPU reads float32 weights up to twice as fast as the left
# operand, and bfloat16 ones up to 1.5 times as fast as the right one.
_MANY_ROWS = 128

# The released ViT initialises every linear weight with this deviation.
LINEAR_INIT = nn.initializers.normal(0.02)

Dims = int | tuple[int, ...]
# (input dimensions, output dimensions) of a kernel -> its initializer.
KernelInit = Callable[[Dims, Dims], nn.initializers.Initializer]
# Logical names of the input dimensions and of the output dimensions.
KernelAxes = tuple[tuple[str | None, ...], tuple[str | None, ...]]
# A kernel, or what makes it of the one that is stored.
Kernel = jax.Array | Callable[[], jax.Array]
# Parameters beside a "kernel" that change what its layer computes: both factors
# of an adapter and alpha / r, and the scale of a kernel in int8.
LORA_A, LORA_B, LORA_SCALE = "lora_a", "lora_b", "lora_scale"
KERNEL_SCALE = "kernel_scale"
_DROPOUT = contextvars.ContextVar("dropout of adapters", default=0.0)


def initializer(
  make: KernelInit, inputs: Dims, outputs: Dims
) -> nn.initializers.Initializer:
  """The initializer of a kernel with such dimensions.

  Raises:
    TypeError: `make` is an initializer, which takes a key and a shape.
  """
  message = (
    f"kernel_init={make} must make an initializer from a kernel's input and "
    "output dimensions: lambda i, o: nn.initializers.xavier_uniform(i, o)"
  )
  try:
    made = make(inputs, outputs)
  except TypeError as error:
    raise TypeError(message) from error
  if not callable(made):
    raise TypeError(message)
  return made


def normal_init(*_: Dims) -> nn.initializers.Initializer:
  """Normal with one deviation whatever the shape, as in the released ViT."""
  return LINEAR_INIT


def scaled_normal_init(layers: int) -> KernelInit:
  """Normal for the layers that end a residual branch, as in Megatron.

  The deviation is 0.02 / sqrt(2 layers): each layer of a transformer adds two
  branches, and their sum starts as large in a deep network as in a shallow one.

  Args:
    layers: depth of the network.
  """
  init = nn.initializers.normal(0.02 / math.sqrt(2 * layers))
  return lambda *_: init


def xavier_init(inputs: Dims, outputs: Dims) -> nn.initializers.Initializer:
  """Uniform by the fans of the whole matrix, as in the released DiT."""
  return nn.initializers.xavier_uniform(in_axis=inputs, out_axis=outputs)


def product(
  x: jax.Array,
  matrix: jax.Array,
  *,
  output_major: bool = False,
  dtype: jnp.dtype | None = None,
) -> jax.Array:
  """Multiplies activations by a matrix, as one product of two matrices.

  With more axes XLA on the CPU copies operands of the backward pass into
  another order first, at the cost of the product itself.

  Text generation stores weights output-major: every output reads one row, and
  a float32 result keeps bfloat16 products on the CPU's matrix units (XLA's
  other form of them is four times slower there).

  Args:
    x: [..., C].
    matrix: [C, F], or [F, C] if output-major; of the dtype of x.
    output_major: how the matrix is stored.
    dtype: of the result; None is that of x.

  Returns:
    [..., F].
  """
  if axes_of("tokens"):  # merging axes that a mesh splits would gather them
    out = einsum_float32(
      "...c,fc->...f" if output_major else "...c,cf->...f", x, matrix
    )
    return out.astype(dtype or x.dtype)
  rows = x.reshape(-1, x.shape[-1])
  weights_left = x.dtype == jnp.float32 and len(rows) < _MANY_ROWS
  if output_major and weights_left:
    out = einsum_float32("fc,rc->fr", matrix, rows)
    # Without the barrier XLA merges the transposition into the product.
    out = jax.lax.optimization_barrier(out).T
  elif output_major:
    out = einsum_float32("rc,fc->rf", rows, matrix)
  else:
    out = rows @ matrix
  return out.astype(dtype or x.dtype).reshape(*x.shape[:-1], out.shape[-1])


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
  """Adds a bias to the last axes of x: [..., C] + [C] is [..., C]."""
  return x + jax.lax.broadcast_to_rank(bias, x.ndim)


@contextlib.contextmanager
def adapter_dropout(rate: float) -> Iterator[None]:
  """Context in which adapters miss a share of their inputs' elements.

  Args:
    rate: the share; above 0 layers need the rng "dropout".
  """
  token = _DROPOUT.set(rate)
  try:
    yield
  finally:
    _DROPOUT.reset(token)


class KernelLayer(nn.Module, kw_only=True):
  """Base of the layers that multiply by one kernel.

  Attributes:
    use_bias: add a learned bias.
    kernel_init: initializer of the kernel.
    output_major: the kernel is [*outputs, *inputs], else [*inputs, *outputs].
    dtype: compute dtype.
    param_dtype: of the parameters.
    layout: of the heads, for a kernel with the logical axis "heads"; None is
      in the order of the parameters.
  """

  use_bias: bool = True
  kernel_init: KernelInit = normal_init
  output_major: bool = False
  dtype: jnp.dtype = jnp.float32
  param_dtype: jnp.dtype = jnp.float32
  layout: HeadLayout | None = None

  def parameters(
    self,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: KernelAxes,
    bias_axes: tuple[str | None, ...] | None = None,
  ) -> tuple[Kernel, jax.Array | None]:
    """Declares the parameters "kernel" and "bias".

    Args:
      inputs: sizes of the input dimensions.
      outputs: sizes of the output dimensions.
      axes: logical names of both.
      bias_axes: those of the bias; None is the outputs'.

    Returns:
      Both in the compute dtype and the layer's layout: the kernel [*inputs,
      *outputs], or [*outputs, *inputs] if output-major, or what makes it of a
      frozen one in fewer bits; and the bias [*outputs] or None.
    """
    order = slice(None, None, -1 if self.output_major else 1)
    shape = sum((inputs, outputs)[order], ())
    names = sum(axes[order], ())
    count = len((inputs, outputs)[order][0])
    dims = tuple(range(len(shape)))
    fans = (dims[:count], dims[count:])[order]
    init = initializer(self.kernel_init, *fans)
    make = functools.partial(declare, self, param_dtype=self.param_dtype)
    stored = make("kernel", init, shape, names, self.dtype, len(inputs))
    scale = self.get_variable("params", KERNEL_SCALE)

    def kernel() -> jax.Array:
      whole = stored if scale is None else stored * scale
      return self._deal(whole, names)

    if stored.dtype.itemsize >= jnp.dtype(self.dtype).itemsize:
      kernel = kernel()
    if not self.use_bias:
      return kernel, None
    bias_axes = bias_axes or axes[1]
    bias = make("bias", nn.initializers.zeros, outputs, bias_axes)
    return kernel, self._deal(bias, bias_axes)

  def multiply(
    self,
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    count: int,
    fit: Callable[[jax.Array], jax.Array] = lambda kernel: kernel,
  ) -> jax.Array:
    """Multiplies by a kernel in the layer's layout and adds a bias.

    Args:
      x: [..., *inputs].
      kernel: as `parameters` returns it.
      bias: [*outputs] or None.
      count: number of input dimensions.
      fit: applied to the kernel first; may merge or pad its dimensions.

    Returns:
      [..., *outputs] in the compute dtype.
    """
    if callable(kernel):
      # The backward pass makes it again: kept, it would be larger than stored.
      compute = jax.checkpoint(lambda x: self._product(x, fit(kernel()), count))
    else:
      compute = functools.partial(
        self._product, kernel=fit(kernel), count=count
      )
    out = compute(x.astype(self.dtype))
    return out if bias is None else add_bias(out, bias)

  def _product(self, x: jax.Array, kernel: jax.Array, count: int) -> jax.Array:
    lead, inputs = x.shape[:-count], x.shape[-count:]
    stored = kernel.shape
    outputs = stored[:-count] if self.output_major else stored[count:]
    size = math.prod(inputs)
    # Merging output dimensions would undo how a mesh splits them, and merging
    # heads how a TPU stores them.
    merges = len(outputs) == 1 or on_one_device()
    if on_tpu():
      merges = len(inputs) == len(outputs) == 1
    flat = x.reshape(*lead, size)
    if self.output_major:
      out = product(flat, kernel.reshape(-1, size), output_major=True)
    elif merges:
      out = product(flat, kernel.reshape(size, -1))
    else:
      out = jnp.tensordot(x, kernel, count)
    return out.reshape(*lead, *outputs)

  def adapter(
    self, axes_a: tuple[str | None, ...], axes_b: tuple[str | None, ...]
  ) -> tuple[jax.Array, jax.Array] | None:
    """The factors of the layer's adapter, None where it has none.

    Args:
      axes_a: logical names of the dimensions of A.
      axes_b: those of B.

    Returns:
      A [*inputs, r] and B [r, *outputs], which includes alpha / r, both in the
      compute dtype and the layer's layout. Where a kernel has parts, each has
      factors of its own: A [C, parts, r], B [parts, r, H, D].
    """
    if not self.has_variable("params", LORA_A):
      return None
    a, b, scale = (
      self.get_variable("params", name) for name in (LORA_A, LORA_B, LORA_SCALE)
    )
    return self._deal(a, axes_a), self._deal(b * scale, axes_b)

  def adapter_input(self, x: jax.Array) -> jax.Array:
    """What an adapter sees of x [B, ...]: in training it may miss elements."""
    rate = _DROPOUT.get()
    return drop_elements(self, x, rate) if rate else x

  def _deal(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """Casts a parameter and brings its heads to the devices of the layout."""
    x = x.astype(self.dtype)
    placement = self.layout and self.layout.placement
    if placement is None or "heads" not in axes:
      return x
    return placement.deal(x, axes.index("heads"))


class Linear(KernelLayer):
  """A linear layer, [..., C] to [..., features].

  Attributes:
    features: width of the result.
    axes: logical axes of the input and the output.
    gathered: gather the kernel before the product, on a mesh that splits it.
      Left to itself, the compiler sends parts of it between all devices, also
      between slices, before it gathers them.
  """

  features: int
  axes: tuple[str | None, str | None]
  gathered: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., C] to [..., features]."""
    axes = tuple((name,) for name in self.axes)
    kernel, bias = self.parameters(x.shape[-1:], (self.features,), axes)

    def whole(kernel: jax.Array) -> jax.Array:
      return constrain(kernel, None, None) if self.gathered else kernel

    out = self.multiply(x, kernel, bias, 1, whole)
    if factors := self.adapter((self.axes[0], None), (None, self.axes[1])):
      low = product(self.adapter_input(x.astype(self.dtype)), factors[0])
      out = out + product(low, factors[1])
    return out
