"""Stacks of layers under another head budget."""

from typing import Any

import jax.numpy as jnp
from flax import traverse_util

from moh_jax.config import LayerStack


def restack(params: Any, trained: LayerStack, wanted: LayerStack) -> Any:
  """Stacks the layers' parameters in the groups of another head budget.

  Which layers are equal, and so stacked, depends on `top_k`; a layer's own
  parameters do not, but for routers that a layer with `top_k` 0 does without.

  Args:
    params: of the trained model.
    trained: its config.
    wanted: the config of the model that will use them.

  Returns:
    The tree that the wanted model expects, where the trained one has it all;
    the same tree where the runs are equal or the depths differ.
  """
  ours, theirs = trained.layer_groups(), wanted.layer_groups()
  if trained.depth != wanted.depth or [group.depth for group in ours] == [
    group.depth for group in theirs
  ]:
    return params
  layers = [
    {
      path: x[i]
      for path, x in traverse_util.flatten_dict(
        params[f"blocks{index}"]
      ).items()
    }
    for index, group in enumerate(ours)
    for i in range(group.depth)
  ]
  out = {n: tree for n, tree in params.items() if not n.startswith("blocks")}
  first = 0
  for index, group in enumerate(theirs):
    equal = layers[first : first + group.depth]
    first += group.depth
    shared = set.intersection(*(set(layer) for layer in equal))
    out[f"blocks{index}"] = traverse_util.unflatten_dict(
      {p: jnp.stack([layer[p] for layer in equal]) for p in sorted(shared)}
    )
  return out
