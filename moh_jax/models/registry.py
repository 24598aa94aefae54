"""Networks by their config, released models by name, and their parameters.

Parameters of a trained model can be brought into the layout that another config
of it wants.
"""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from moh_jax.config import (
  Config,
  LayerStack,
  RoutedLayers,
  get_family,
  imported,
  released_model,
)
from moh_jax.config.registry import released_models
from moh_jax.config.released import REPOSITORIES


def make_model(
  config: Config,
) -> tuple[nn.Module, tuple[jax.ShapeDtypeStruct, ...]]:
  """The configured network.

  Args:
    config: of the run.

  Returns:
    The Linen module, and its abstract positional inputs with a batch of one.

  Raises:
    ValueError: a field of the model is left to the data, see
      `data.infer.resolve`.
  """
  model = config.model
  model.check_complete()
  network = imported(get_family(model.family).network)(model)
  inputs = (jax.ShapeDtypeStruct(*each) for each in model.example_inputs)
  return network, tuple(inputs)


def get_model(name: str) -> tuple[nn.Module, Any]:
  """A released model by name, with parameters yet to be initialised.

  Args:
    name: such as "moh-vit-s80".

  Returns:
    The Linen module, and its model section.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  section = released_model(name)
  return imported(get_family(section.family).network)(section), section


def list_models() -> dict[str, dict[str, Any]]:
  """The released models by name, and what each is.

  "heads" are those of a layer (ViT: stage), "formats" the values of `convert
  --from` that read its weights, and "repository" where the Hugging Face Hub has
  them, or None: `convert` takes them from its cache.
  """
  found = {}
  for name, section in released_models().items():
    family = get_family(section.family)
    formats = [kind for kind, s in family.formats.items() if name.startswith(s)]
    found[name] = {
      "family": family.name,
      "heads": section.num_heads,
      "activated_share": section.activated_share,
      "formats": tuple(formats),
      "repository": REPOSITORIES.get(name),
    }
  return found


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


def grow_vocabulary(params: Any, rows: int) -> Any:
  """Adds tokens, whose vectors are the mean of the old ones.

  Args:
    params: of a model with fewer tokens.
    rows: tokens wanted.

  Returns:
    Parameters of a model with `rows` tokens.
  """
  grown = dict(params)
  for module, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
    if module in params:
      old = params[module][leaf]
      mean = old.mean(axis, keepdims=True)
      new = jnp.repeat(mean, rows - old.shape[axis], axis=axis)
      grown[module] = {leaf: jnp.concatenate([old, new], axis=axis)}
  return grown


def serving_dtypes(params: Any, model: RoutedLayers) -> Any:
  """Dtypes that parameters can be stored in without changing any output.

  Some networks use matrices in the compute dtype alone; routers, norms and
  biases stay float32.

  Args:
    params: arrays or ShapeDtypeStructs.
    model: section of the network.

  Returns:
    A tree of dtypes.
  """

  def dtype(path: tuple, leaf: Any) -> jnp.dtype:
    names = [key.key for key in path]
    matrix = names[-1] in ("kernel", "embedding") and "router" not in names
    in_compute = matrix and model.SERVED_IN_DTYPE
    return jnp.dtype(model.dtype) if in_compute else leaf.dtype

  return jax.tree_util.tree_map_with_path(dtype, params)
