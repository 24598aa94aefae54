"""How alike the heads of each layer are, over labelled examples.

The paper's Table B (arXiv:2410.11842) in kind: heads that specialise attend to
other tokens and add other features than their neighbours. Every head is
computed for every token, whatever a router chose, so models with and without a
router are measured alike. Layers know nothing of it: calls are intercepted.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, C width.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.evaluation.probe import Batch, Probe, on_host, recorded_layers
from moh_jax.layers.aggregated import AggregatedAttention, FullAttention
from moh_jax.layers.heads import HeadMix
from moh_jax.ops.call import Call, Visible
from moh_jax.runtime.mesh import replicated

_BATCHES = 8  # batches that are measured at most
_EXACT = jax.lax.Precision.HIGHEST
_TOKENS = 256  # tokens of a text that are read at most: logits are their square


class HeadSimilarity(NamedTuple):
  """Mean cosines between heads of a layer, by the layer's name.

  Attributes:
    patterns: [H, H] of the attention weights; where attention is to a window
      and to pooled tokens, of the weights of both.
    features: [H, H] of what the heads add to the tokens.
  """

  patterns: dict[str, np.ndarray]
  features: dict[str, np.ndarray]


def head_similarity(
  probe: Probe, config: Config, params: Any, batches: Iterable[Any], mesh: Mesh
) -> HeadSimilarity:
  """Measures cosines between heads in one pass over a few batches.

  Args:
    probe: of the family.
    config: of the model.
    params: its parameters, on the mesh.
    batches: as for `head_stats`.
    mesh: the devices.

  Raises:
    ValueError: there is no example.
  """

  def step(params: Any, batch: Batch) -> tuple[Any, jax.Array]:
    with nn.intercept_methods(_capture):
      _, recorded = probe.apply(params, batch, mutable=["intermediates"])
    counted = probe.counted(batch)

    def total(cosines: jax.Array) -> jax.Array:  # [B, N, H, H]
      weights = jnp.broadcast_to(counted, cosines.shape[:2])
      weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1.0)
      return jnp.einsum("bnhi,bn->hi", cosines, weights)

    found = recorded["intermediates"]
    sums = {
      name: list(map(total, recorded_layers(found, name, 4)))
      for name in ("patterns", "features")
    }
    return sums, (counted.max(1) > 0).sum()

  jitted = jax.jit(step, out_shardings=replicated(mesh))
  sums, examples = None, 0
  for batch in itertools.islice(batches, _BATCHES):
    if config.model.READS_TEXT:
      batch = {
        n: x[:, :_TOKENS] if x.ndim == 2 else x for n, x in batch.items()
      }
    part, count = jax.tree.map(on_host, jitted(params, batch))
    sums = part if sums is None else jax.tree.map(np.add, sums, part)
    examples += count
  if not examples:
    raise ValueError("there is no example to compare heads on")
  names = config.model.layer_budgets()
  means = {
    kind: {name: x / examples for name, x in zip(names, layers)}
    for kind, layers in sums.items()
  }
  return HeadSimilarity(**means)


def mean_similarity(cosines: np.ndarray) -> float:
  """Mean of [H, H] over pairs of different heads; NaN for a single head."""
  heads = len(cosines)
  pairs = heads * (heads - 1)
  return float((cosines.sum() - np.trace(cosines)) / pairs if pairs else np.nan)


def _capture(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
  """Has a layer compute every head, and records how alike its heads are."""
  layer = context.module
  if isinstance(layer, HeadMix) and context.method_name == "__call__":
    layer.sow("intermediates", "features", _features(layer, args[0]))
  elif context.method_name == "attend":
    layer.sow("intermediates", "patterns", _patterns(layer, args[0]))
    if isinstance(args[0], Call):  # every head, whatever tokens chose
      args = dataclasses.replace(args[0], active=None), *args[1:]
  return call(*args, **kwargs)


def _features(layer: HeadMix, heads: jax.Array) -> jax.Array:
  """Cosines of what every two heads add, in the order of the layer."""
  kernel = nn.meta.unbox(layer.get_variable("params", "kernel"))
  kernel = jnp.moveaxis(kernel, 0, -1) if layer.output_major else kernel
  if layer.layout is not None:
    heads = heads[..., : layer.layout.dim].swapaxes(2, 3)
    heads = layer.layout.undealt(heads).swapaxes(2, 3)
  return feature_cosines(heads, kernel)


def _patterns(layer: nn.Module, given: Any) -> jax.Array:
  """Cosines of a layer's attention weights, in the order of the layer."""
  if isinstance(layer, AggregatedAttention):
    near, pooled, total = given
    pooled = pooled.swapaxes(1, 2) / total[..., None]
    return cosines(jnp.concatenate([near, pooled], axis=-1))
  found = pattern_cosines(
    given.q, given.k, visible=given.visible, scale=given.scale, bias=given.bias
  )
  if isinstance(layer, FullAttention):
    return found
  layout = layer.layout(cached=False)
  for _ in range(2):  # rows, then columns
    found = layout.undealt(found).swapaxes(2, 3)
  return found


def pattern_cosines(
  q: jax.Array,
  k: jax.Array,
  *,
  visible: Visible,
  scale: float,
  bias: jax.Array | None = None,
) -> jax.Array:
  """Cosines of the attention weights of every two heads, at every query.

  Args:
    q: [B, N, H, D].
    k: [B, M, K, D].
    visible: which keys a query sees.
    scale: factor of the logits.
    bias: [H, N, M] added to the scaled logits, or None.

  Returns:
    [B, N, H, H] float32; 0 for a query that sees no key.
  """
  q, k = (x.astype(jnp.float32) for x in (q, k))
  k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
  logits = jnp.einsum("bnhd,bmhd->bhnm", q, k, precision=_EXACT) * scale
  if bias is not None:
    logits = logits + bias[None]
  mask = visible.mask(q.shape[1], k.shape[1])
  if mask is not None:
    logits = jnp.where(mask, logits, -jnp.inf)
  highest = logits.max(-1, keepdims=True)
  weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
  return cosines(weights.swapaxes(1, 2))


def feature_cosines(heads: jax.Array, kernel: jax.Array) -> jax.Array:
  """Cosines of what every two heads add to each token.

  Outputs of two heads have no coordinates in common before the output
  projection, so they are compared behind it.

  Args:
    heads: [B, N, H, D] outputs of the heads, without gates.
    kernel: [H, D, C] of the output projection.

  Returns:
    [B, N, H, H] float32.
  """
  heads, kernel = (x.astype(jnp.float32) for x in (heads, kernel))
  added = jnp.einsum("bnhd,hdc->bnhc", heads, kernel, precision=_EXACT)
  return cosines(added)


def cosines(vectors: jax.Array) -> jax.Array:
  """Cosines [B, N, H, H] of vectors [B, N, H, X]; those of a zero are 0."""
  norms = jnp.sqrt(jnp.square(vectors).sum(-1, keepdims=True))
  unit = vectors / jnp.where(norms > 0, norms, 1.0)
  return jnp.einsum("bnhx,bnix->bnhi", unit, unit, precision=_EXACT)
