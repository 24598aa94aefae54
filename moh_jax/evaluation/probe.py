"""How the heads of a family's network are watched on labelled examples."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moh_jax.config import Config, LLMConfig, get_family, imported
from moh_jax.config.heads import Units
from moh_jax.evaluation.metrics import noise_of_index
from moh_jax.layers.vocabulary import summed_nats
from moh_jax.models.diffusion import make_process, q_sample
from moh_jax.models.llm import apply_packed, output_kernel

_TIME_GROUPS = 10  # ranges of timesteps that head statistics tell apart

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Grouping:
  """Examples by something that they have in common.

  Attributes:
    names: of the groups.
    index: batch -> [B] int32, the group of each example.
  """

  names: tuple[str, ...]
  index: Callable[[Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Probe:
  """What head statistics must know of a family's network.

  Attributes:
    apply: (params, batch, **options) -> the result of the network's `apply` on
      a batch; the options are those of `flax.linen.Module.apply`.
    shown: key of what the network reads in a batch, which routing maps keep.
    label: what a label of the data stands for, "class" or "text".
    groupings: further groupings by name, such as the timesteps of diffusion.
    grids: rows and columns of the tokens in each group of equal layers, where
      they are patches of an image; () for text.
    importance: (params, batches) -> importance of every head [layers, H]; None
      where nothing measures it.
  """

  apply: Callable[..., Any]
  shown: str = "image"
  label: str = "class"
  groupings: Mapping[str, Grouping] = dataclasses.field(default_factory=dict)
  grids: tuple[tuple[int, int], ...] = ()
  importance: Callable[[Any, Iterable[Batch]], np.ndarray] | None = None

  def counted(self, batch: Batch) -> jax.Array:
    """[B, N], or [B, 1] where no token is padding: 1 for what counts."""
    counted = batch["mask"][:, None]
    if "segments" in batch:  # 0 is padding
      counted = counted * (batch["segments"] > 0)
    return counted


def make_probe(network: nn.Module, config: Config) -> Probe:
  """How `heads` runs a network on a held-out batch, and groups examples.

  Raises:
    NotImplementedError: the family does not say.
  """
  family = config.model.family
  probe = imported(get_family(family).probe)
  if probe is None:
    raise NotImplementedError(f"model.family={family!r} has no probe of heads")
  return probe(network, config)


def image_probe(network: nn.Module, config: Config) -> Probe:
  """Images by class."""

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    return network.apply({"params": params}, batch["image"], **options)

  return Probe(apply, grids=config.model.token_grids())


def diffusion_probe(network: nn.Module, config: Config) -> Probe:
  """Noisy examples by class and by timestep."""
  process = make_process(config.diffusion.schedule, config.diffusion.steps)
  steps = config.diffusion.steps
  parts = min(_TIME_GROUPS, steps)
  bounds = [part * steps // parts for part in range(parts + 1)]
  names = [f"{a}-{b - 1}" for a, b in itertools.pairwise(bounds)]

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    x0, labels = batch["image"], batch["label"]
    t, noise = noise_of_index(batch["index"], x0.shape[1:], steps)
    x = q_sample(process, x0, t, noise)
    times = jnp.asarray(process.timesteps)[t]
    return network.apply({"params": params}, x, times, labels, **options)

  def time_group(batch: Batch) -> jax.Array:
    t, _ = noise_of_index(batch["index"], batch["image"].shape[1:], steps)
    return jnp.searchsorted(jnp.asarray(bounds[1:-1]), t, side="right")

  return Probe(
    apply,
    groupings={"timestep": Grouping(tuple(names), time_group)},
    grids=config.model.token_grids(),
  )


def text_probe(network: nn.Module, config: Config) -> Probe:
  """Packed sequences by text, and the importance of heads for the loss.

  Heads have no importance where layers differ in their number.
  """

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    mask = batch["segments"] > 0
    return apply_packed(network, params, batch, token_mask=mask, **options)

  importance = None
  if len(set(config.model.num_heads)) == 1:
    importance = functools.partial(head_importance, network, config.model)
  return Probe(apply, shown="inputs", label="text", importance=importance)


def recorded_layers(recorded: Any, name: str, rank: int) -> list[Any]:
  """What layers recorded under a name, in the order of the layers.

  Args:
    recorded: a collection of a network, such as its "intermediates".
    name: what was recorded.
    rank: dimensions of its arrays, without that of stacked layers.

  Returns:
    A value for each layer, without the axis of layers that a scan stacks.
  """
  flat = traverse_util.flatten_dict(recorded)
  found = {"/".join(path): x for path, x in flat.items() if path[-1] == name}

  def place(path: str) -> str:  # "blocks10" comes after "blocks2"
    return re.sub(r"\d+", lambda number: number[0].zfill(6), path)

  layers = []
  for path in sorted(found, key=place):
    (value,) = found[path]
    first = jax.tree.leaves(value)[0]
    if first.ndim == rank:
      layers.append(value)
    else:
      layers += [jax.tree.map(lambda x: x[i], value) for i in range(len(first))]  # noqa: B023
  return layers


def on_host(x: jax.Array) -> np.ndarray:
  """A replicated array on the host, wide enough for sums of many batches."""
  return np.asarray(x.addressable_data(0), np.float64)


def head_importance(
  model: nn.Module, config: LLMConfig, params: Any, batches: Iterable[Any]
) -> np.ndarray:
  """Mean absolute gradient of the loss with respect to a gate on each head.

  Each head's output is multiplied by a gate of 1. To first order, the gradient
  of a sequence's loss with respect to the gate is the change of the loss when
  the head is removed (arXiv:1905.10650, eq. 2). As in that paper, the
  importances of a layer are divided by their L2 norm, since layers differ in
  the size of their gradients.

  Args:
    model: the network.
    config: model section; every layer has the same number of heads.
    params: parameters of the network.
    batches: batches of packed sequences on the devices, as in training.

  Returns:
    Importances [layers, H] float64, with L2 norm 1 in each layer.

  Raises:
    ValueError: there is no batch.
  """
  heads = config.num_heads[0]

  def losses(scale: jax.Array, params: Any, batch: Any) -> jax.Array:
    """Sum of the mean losses of all sequences; scale is the heads' gates."""
    x, _ = apply_packed(model, params, batch, head_scale=scale)
    weights = batch["weights"]
    targets = jnp.maximum(weights.sum(-1, keepdims=True), 1.0)
    kernel, weights = output_kernel(params, config), weights / targets
    return summed_nats(x, kernel, batch["targets"], weights, config.loss_chunk)

  @jax.jit
  def measure(params: Any, batch: Any) -> jax.Array:
    # Gates per sequence, so that one backward pass gives every gradient.
    ones = jnp.ones((config.depth, len(batch["inputs"]), 1, heads))
    return jnp.abs(jax.grad(losses)(ones, params, batch)).sum((1, 2))

  total, count = np.zeros((config.depth, heads)), 0
  for batch in batches:
    total += np.asarray(measure(params, batch), np.float64)
    count += batch["inputs"].shape[0]
  if not count:
    raise ValueError("there is no text to measure heads on")
  importance = total / count
  norms = np.sqrt(np.square(importance).sum(-1, keepdims=True))
  return importance / np.where(norms > 0, norms, 1.0)


def order_by_importance(
  importance: np.ndarray, units: Sequence[Units]
) -> tuple[tuple[int, ...], ...]:
  """Orders the heads of each layer from most to least important.

  Args:
    importance: [layers, H].
    units: what tokens choose among in the layers; heads that are chosen
      together stay together, and count together. It is empty without a router.

  Returns:
    Head numbers by layer, a value of `model.head_order`.
  """
  orders, sizes = [], [of.size for of in units] or [1] * len(importance)
  for row, size in zip(importance, sizes, strict=True):
    unit = np.arange(len(row)) // size
    worth = np.bincount(unit, row)[unit]
    orders.append(tuple(np.lexsort((-row, unit, -worth)).tolist()))
  return tuple(orders)
