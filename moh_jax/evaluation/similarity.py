"""How alike the heads of each layer are, over labelled examples.

The paper's Table B (arXiv:2410.11842) in kind: heads that specialise attend to
other tokens and add other features than their neighbours. Every head is
computed for every token, whatever a router chose, so models with and without a
router are measured alike.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.evaluation.head_stats import recorded_layers
from moh_jax.evaluation.probe import Batch, Probe
from moh_jax.ops.head_similarity import SIMILARITY
from moh_jax.runtime import sharding

_BATCHES = 8  # batches that are measured at most
_TOKENS = 256  # tokens of a text that are read at most: logits are their square


@dataclasses.dataclass(frozen=True)
class HeadSimilarity:
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
    _, recorded = probe.apply(params, batch, mutable=[SIMILARITY])
    counted = batch["mask"][:, None]
    if probe.token_mask is not None:
      counted = counted * probe.token_mask(batch)

    def total(cosines: jax.Array) -> jax.Array:  # [L, B, N, H, H]
      weights = jnp.broadcast_to(counted, cosines.shape[1:3])
      weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1.0)
      return jnp.einsum("lbnhi,bn->lhi", cosines, weights)

    sums = {
      name: [
        total(stack) for stack in recorded_layers(recorded[SIMILARITY], name, 4)
      ]
      for name in ("patterns", "features")
    }
    return sums, (counted.max(1) > 0).sum()

  jitted = jax.jit(step, out_shardings=sharding.replicated(mesh))
  sums, examples = None, 0
  for batch in itertools.islice(batches, _BATCHES):
    if config.model.READS_TEXT:
      batch = {
        n: x[:, :_TOKENS] if x.ndim == 2 else x for n, x in batch.items()
      }
    part, count = jax.tree.map(
      lambda x: np.asarray(x.addressable_data(0), np.float64),
      jitted(params, batch),
    )
    sums = part if sums is None else jax.tree.map(np.add, sums, part)
    examples += count
  if not examples:
    raise ValueError("there is no example to compare heads on")
  names = config.model.layer_budgets()
  return HeadSimilarity(
    **{
      kind: {
        name: layer / examples
        for name, layer in zip(names, itertools.chain(*stacks))
      }
      for kind, stacks in sums.items()
    }
  )


def mean_similarity(cosines: np.ndarray) -> float:
  """Mean of [H, H] over pairs of different heads; NaN for a single head."""
  heads = len(cosines)
  pairs = heads * (heads - 1)
  return float((cosines.sum() - np.trace(cosines)) / pairs if pairs else np.nan)
