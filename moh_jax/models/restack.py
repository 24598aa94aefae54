"""Parameters of a trained model in the layout that another config wants."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from moh_jax.config import LayerStack, RoutedLayers
from moh_jax.models.llm_params import compute_dtypes, grow_vocabulary


def fit_params(params: Any, trained: RoutedLayers, wanted: RoutedLayers) -> Any:
  """Parameters of a trained model in the layout of another config of it.

  Layers are stacked as the wanted head budgets group them, and a larger
  vocabulary gets further rows.

  Args:
    params: the parameter tree of `trained`.
    trained: model section that the parameters were trained with.
    wanted: section of the model that will use them.
  """
  if getattr(wanted, "vocab_size", 0) > getattr(trained, "vocab_size", 0):
    params = grow_vocabulary(params, wanted.vocab_size)
  if isinstance(wanted, LayerStack):
    params = restack(params, trained, wanted)
  return params


def serving_dtypes(params: Any, model: RoutedLayers) -> Any:
  """Dtypes that parameters can be stored in without changing any output.

  Args:
    params: arrays or ShapeDtypeStructs.
    model: section of the network.

  Returns:
    A tree of dtypes.
  """
  if model.SERVED_IN_DTYPE:
    return compute_dtypes(params, model)
  return jax.tree.map(lambda x: x.dtype, params)


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
  ours, theirs = (
    [group.depth for group in config.layer_groups()]
    for config in (trained, wanted)
  )
  if trained.depth != wanted.depth or ours == theirs:
    return params
  stacks = (params[f"blocks{index}"] for index in range(len(ours)))
  layers = [
    {path: x[i] for path, x in stack.items()}
    for stack, depth in zip(map(traverse_util.flatten_dict, stacks), ours)
    for i in range(depth)
  ]
  out = {n: tree for n, tree in params.items() if not n.startswith("blocks")}
  rest = iter(layers)
  for index, depth in enumerate(theirs):
    equal = list(itertools.islice(rest, depth))
    shared = set.intersection(*(set(layer) for layer in equal))
    out[f"blocks{index}"] = traverse_util.unflatten_dict(
      {p: jnp.stack([layer[p] for layer in equal]) for p in sorted(shared)}
    )
  return out
