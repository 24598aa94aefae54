"""Stacks of equal blocks, scanned so that they compile once; side values."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.layers.partitioning import draw_examples, sum_examples
from moh_jax.ops.basics import ATTENTION
from moh_jax.ops.routing import RouterAux

_policies = jax.checkpoint_policies

# Values of a block that the backward pass keeps; it computes the others again.
REMAT_POLICIES: dict[str, Callable] = {
  "full": _policies.nothing_saveable,
  "attention": _policies.save_only_these_names(ATTENTION),
  "dots": _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable,
    _policies.save_only_these_names(ATTENTION),
  ),
  "all_dots": _policies.save_from_both_policies(
    _policies.dots_saveable, _policies.save_only_these_names(ATTENTION)
  ),
}


def scan_blocks(
  block: type[nn.Module], depth: int, *, in_axes: tuple, remat: str = "none"
) -> type[nn.Module]:
  """Lifts a block to a stack of `depth` blocks with stacked parameters.

  The block maps (carry, *inputs) to (carry, outputs). The stack returns the
  last carry, and the outputs of all blocks with a leading layer axis: routers'
  side values and caches, for instance. Parameters and recorded intermediates
  get a leading layer axis too.

  Args:
    block: the Linen class.
    depth: blocks in the stack.
    in_axes: per input after the carry, 0 if it has a leading layer axis of
      which every block gets its part, or `nn.broadcast`.
    remat: what the backward pass computes again: "none" (nothing), "full"
      (everything), or everything but the results of "attention", of attention
      and products with weights ("dots"), or of attention and all products
      ("all_dots", which with dense attention are the logits too).

  Returns:
    The lifted class.
  """
  if remat != "none":
    block = nn.remat(block, policy=REMAT_POLICIES[remat], prevent_cse=False)
  return nn.scan(
    block,
    variable_axes={"params": 0, "intermediates": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=in_axes,
    length=depth,
    metadata_params={nn.PARTITION_NAME: "layers"},
  )


class DropPath(nn.Module):
  """Stochastic depth (arXiv:1603.09382): drops a branch for some examples.

  Attributes:
    deterministic: drop nothing, as in evaluation.
  """

  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, rate: jax.Array) -> jax.Array:
    """Zeroes examples of x [B, ...] with probability `rate`, scales others."""
    if self.deterministic:
      return x
    keep = 1.0 - rate
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    draw = functools.partial(jax.random.bernoulli, p=keep)
    kept = draw_examples(draw, self.make_rng("dropout"), shape)
    return x * (kept / keep).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelAux:
  """Router side values of a whole model.

  Attributes:
    balance_loss: [] float32 mean over the layers that route, 0 if none does.
    activated_share: [] float32 heads used over all heads, of all layers.
    layers: the values that `collect_aux` was given.
  """

  balance_loss: jax.Array
  activated_share: jax.Array
  layers: Mapping[str, RouterAux] | Sequence[RouterAux]


def collect_aux(
  layers: Mapping[str, RouterAux] | Sequence[RouterAux],
) -> ModelAux:
  """Gathers the side values of a model's attention layers.

  For instance `collect_aux({"block0": aux0, "block1": aux1})`.

  Args:
    layers: by name or in order, the side values of a layer, or of a scanned
      stack of equal layers (with a leading layer axis).

  Returns:
    The model's balance loss and activated share. Every layer counts once,
    whether it is part of a stack or not.
  """
  layers = sum_examples(layers)
  values = list(layers.values() if isinstance(layers, Mapping) else layers)
  losses = [jnp.atleast_1d(aux.balance_loss) for aux in values if aux.routed]
  loss = jnp.concatenate(losses or [jnp.zeros(1, jnp.float32)]).mean()
  used = sum(aux.heads_used.sum() for aux in values)
  present = sum(aux.counts.size for aux in values)
  return ModelAux(loss, used / present, layers)
