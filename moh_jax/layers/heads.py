"""Tokens to per-head vectors, and per-head outputs back to tokens.

Shapes: B batch, N tokens, C width, H heads, D head dim.
"""

import functools
import math
from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.linear import Kernel, KernelLayer
from moh_jax.layers.partitioning import axes_of, constrain, map_shards
from moh_jax.ops.lanes import (
  LANES,
  HeadLayout,
  fill_lanes,
  heads_in_lanes,
  on_tpu,
  over_lanes,
  padded_dim,
  store_by_head,
)
from moh_jax.ops.placement import HeadPlacement

_HEAD_AXES = ("heads", "head_dim")


def layer_layout(
  dim: int,
  *heads: int,
  pads: bool = False,
  placement: HeadPlacement | None = None,
) -> HeadLayout:
  """The layout of a layer's heads on the mesh and device of this trace.

  Args:
    dim: D.
    *heads: numbers of heads that the layer's arrays have.
    pads: whether heads may be wider than D in arrays, where that fills lanes.
    placement: the order in which devices compute the heads.
  """
  if not on_tpu():
    return HeadLayout(dim, dim, placement=placement)
  devices = {x: math.prod(axes_of("heads", x).values()) for x in heads}

  def sets(width: int) -> dict[int, int]:
    return {
      heads: heads_in_lanes(heads // count, width)
      for heads, count in devices.items()
    }

  width = padded_dim(dim) if pads else dim
  if width % LANES and sets(width)[min(devices)] == 1:
    width = dim
  return HeadLayout(dim, width, tuple(sets(width).items()), placement)


class HeadProjection(KernelLayer):
  """Projects tokens to per-head vectors, several kinds in one product.

  On a TPU each kind is a product of its own (`ops.lanes` says why).

  The kernel is [C, parts, H, D], or output-major [parts, H, D, C].

  Attributes:
    parts: kinds of vectors (3 for queries, keys and values).
    num_heads: heads of each kind.
    head_dim: D, width of a head.
  """

  parts: int
  num_heads: int
  head_dim: int

  @nn.compact
  def __call__(self, x: jax.Array) -> list[jax.Array]:
    """Maps x [B, N, C] to `parts` arrays [B, N, H, D or the layout's width]."""
    shape = (self.parts, self.num_heads, self.head_dim)
    axes = (("embed",), (None, *_HEAD_AXES))
    kernel, bias = self.parameters(x.shape[-1:], shape, axes)
    parts = range(self.parts)
    if on_tpu() and not self.output_major:
      biases = [None] * self.parts if bias is None else bias
      vectors = [
        self._one_part(x, kernel, biases[i], lambda k, i=i: k[:, i])
        for i in parts
      ]
    else:
      out = self.multiply(x, kernel, bias, 1)
      # The gradient of a split is one concatenation; that of slices is a sum.
      vectors = [v[:, :, 0] for v in jnp.split(out, self.parts, axis=2)]
    axes_a, axes_b = ("embed", None, None), (None, None, *_HEAD_AXES)
    if factors := self.adapter(axes_a, axes_b):
      a, b = factors
      low = self.multiply(self.adapter_input(x), a, None, 1)
      one = functools.partial(self.multiply, count=1)
      if on_tpu():
        one = self._one_part
      more = [one(low[:, :, i], b[i], None) for i in parts]
      vectors = list(map(jnp.add, vectors, more))
    return [constrain(v, "batch", "tokens", *_HEAD_AXES) for v in vectors]

  def _one_part(
    self,
    x: jax.Array,
    kernel: Kernel,
    bias: jax.Array | None,
    part: Callable[[jax.Array], jax.Array] = lambda kernel: kernel,
  ) -> jax.Array:
    """Projects to one kind of vectors, with heads side by side in the lanes.

    Args:
      x: [B, N, C].
      kernel: that part of it is [C, H, D].
      bias: [H, D] or None.
      part: takes the part from the kernel.

    Returns:
      [B, N, H, width].
    """
    layout = self.layout or layer_layout(self.head_dim, self.num_heads)
    width, count = layout.width, layout.count(self.num_heads)
    if bias is not None:
      bias = fill_lanes(_pad(bias, width, -1), count)

    def laid_out(kernel: jax.Array) -> jax.Array:
      return fill_lanes(_pad(part(kernel), width, -1), count)

    out = self.multiply(x, kernel, bias, 1, laid_out)
    if width != self.head_dim:
      out = _store_by_head(out)
    return out.reshape(*x.shape[:-1], self.num_heads, width)


class HeadMix(KernelLayer):
  """Gated sum of the heads' outputs (arXiv:2410.11842, eq. 4).

  The kernel is [H, D, C], or output-major [C, H, D].

  Attributes:
    features: C, width of the result.
    multiplier: constant that multiplies the result.
  """

  features: int
  multiplier: float = 1.0

  @nn.compact
  def __call__(
    self, heads: jax.Array, gates: jax.Array | None = None
  ) -> jax.Array:
    """Mixes heads.

    Args:
      heads: [B, N, H, D or the layout's width].
      gates: [B, N, H], or None to weigh every head by one.

    Returns:
      [B, N, C].
    """
    chex.assert_rank(heads, 4)
    num_heads, dim = heads.shape[2:]
    layout = self.layout or layer_layout(dim, num_heads)
    inputs, axes = (num_heads, layout.dim), (_HEAD_AXES, ("embed",))
    # The bias is whole on every device: to gather it would take longer than
    # the memory is worth.
    kernel, bias = self.parameters(inputs, (self.features,), axes, (None,))
    count = 1 if self.output_major else layout.count(num_heads)

    def laid_out(kernel: jax.Array) -> jax.Array:
      kernel = _pad(kernel, dim, -1 if self.output_major else 1)
      if count == 1:
        return kernel
      kernel = kernel.reshape(-1, count * dim, kernel.shape[-1])
      # Without the barrier XLA takes the heads of the gradient's product apart
      # again, and for that copies its input.
      return jax.lax.optimization_barrier(kernel)

    gated = fill_lanes(heads, count)
    if dim != layout.dim:
      gated = _store_by_head(gated)
    if gates is not None:
      chex.assert_equal_shape_prefix((heads, gates), 3)
      gates = self.multiplier * gates
      gated = gated * over_lanes(gates, count, dim).astype(heads.dtype)
    elif self.multiplier != 1:
      gated = self.multiplier * gated
    if bias is not None:
      bias = self.multiplier * bias
    out = self.multiply(gated, kernel, bias, 2, laid_out)
    if factors := self.adapter((*_HEAD_AXES, None), (None, "embed")):
      a, b = factors
      low = self.multiply(self.adapter_input(gated), a, None, 2, laid_out)
      out = out + self.multiply(low, b, None, 1)
    return constrain(out, "batch", "tokens", None)


def _store_by_head(x: jax.Array) -> jax.Array:
  """Calls `lanes.store_by_head` for each device's part of [B, N, S, W].

  XLA's partitioner would gather the array to set its order.
  """
  names = "batch", "tokens", "heads", None
  return map_shards(store_by_head, (x,), (names,), names)


def _pad(x: jax.Array, size: int, axis: int) -> jax.Array:
  """Appends zeros to a parameter along an axis, up to a size."""
  if size == x.shape[axis]:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  # Without the barrier XLA for TPUs takes two slices in the gradient, that of
  # the axis and a device's own part, for one reduce-scatter, and fails.
  return jax.lax.optimization_barrier(jnp.pad(x, widths))
