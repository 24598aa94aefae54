"""Tokens to per-head vectors, and per-head outputs back to tokens.

Shapes: B batch, N tokens, C width, H heads, D head dim.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.linear import KernelLayer
from moh_jax.layers.partitioning import constrain
from moh_jax.ops.head_similarity import SIMILARITY, feature_cosines

_HEAD_AXES = ("heads", "head_dim")


class HeadProjection(KernelLayer):
  """Projects tokens to per-head vectors, several kinds in one product.

  The kernel is [C, parts, H, D], or output-major [parts, H, D, C].

  Attributes:
    parts: kinds of vectors (3 for queries, keys and values).
    num_heads: heads of each kind.
    head_dim: width of a head.
  """

  parts: int
  num_heads: int
  head_dim: int

  @nn.compact
  def __call__(self, x: jax.Array) -> list[jax.Array]:
    """Maps x [B, N, C] to `parts` arrays [B, N, H, D]."""
    shape = (self.parts, self.num_heads, self.head_dim)
    out = self.project(x, shape, (("embed",), (None, *_HEAD_AXES)))
    # The gradient of a split is one concatenation; that of slices is a sum.
    vectors = [v[:, :, 0] for v in jnp.split(out, self.parts, axis=2)]
    return [constrain(v, "batch", "tokens", *_HEAD_AXES) for v in vectors]


class HeadMix(KernelLayer):
  """Gated sum of the heads' outputs (arXiv:2410.11842, eq. 4).

  Under `mutable=["similarity"]` it records how alike the heads are, "features"
  (`ops.head_similarity.feature_cosines`).

  The kernel is [H, D, C], or output-major [C, H, D].

  Attributes:
    features: C, width of the result.
  """

  features: int

  @nn.compact
  def __call__(
    self, heads: jax.Array, gates: jax.Array | None = None
  ) -> jax.Array:
    """Mixes heads.

    Args:
      heads: [B, N, H, D].
      gates: [B, N, H], or None to weigh every head by one.

    Returns:
      [B, N, C].
    """
    chex.assert_rank(heads, 4)
    gated = heads
    if gates is not None:
      chex.assert_equal_shape_prefix((heads, gates), 3)
      gated = heads * gates[..., None].astype(heads.dtype)
    # The bias is whole on every device: to gather it would take longer than
    # the memory is worth.
    out = self.project(
      gated, (self.features,), (_HEAD_AXES, ("embed",)), bias_axes=(None,)
    )
    if self.is_mutable_collection(SIMILARITY) and not self.is_initializing():
      kernel = nn.meta.unbox(self.get_variable("params", "kernel"))
      kernel = jnp.moveaxis(kernel, 0, -1) if self.output_major else kernel
      self.sow(SIMILARITY, "features", feature_cosines(heads, kernel))
    return constrain(out, "batch", "tokens", None)
