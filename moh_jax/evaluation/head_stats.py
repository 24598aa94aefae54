"""Statistics of routed heads: which heads the tokens of each group use.

One pass over labelled examples. The devices reduce every batch to sums over
tokens, so memory is that of one batch, whatever the number of examples.

Shapes: L layers, G groups, H heads, R routed ones, B examples, N tokens. Heads
are listed as the router does, the shared ones first.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.evaluation.probe import (
  Batch,
  Grouping,
  Probe,
  on_host,
  recorded_layers,
)
from moh_jax.ops.routing import Routing, load_entropy
from moh_jax.runtime.batches import gather
from moh_jax.runtime.mesh import replicated
from moh_jax.runtime.parameters import check_finite

_MAPS = 8  # examples whose routing maps are kept, about as many of each label
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer whose router was watched.

  Attributes:
    name: of its stack and its place in it, such as "stage1.0".
    budget: its head split.
    units: what its tokens choose among.
    order: [H] number of each listed head, not 0, 1, ... where
      `model.head_order` or `router.structure` chooses the shared heads.
    grid: rows and columns of its tokens, None for text.
  """

  name: str
  budget: HeadBudget
  units: Units
  order: tuple[int, ...]
  grid: tuple[int, int] | None = None

  @property
  def routed(self) -> tuple[int, ...]:
    """Numbers of the routed heads, as they are listed."""
    return self.order[self.budget.shared :]


class GroupStats(NamedTuple):
  """Means over the tokens of each group, float64; NaN for a group without any.

  Attributes:
    names: of the G groups.
    load: for each layer [G, H] share of tokens that use each head: 1 for shared
      heads; the sum over the routed ones is top_k.
    weights: [L, G, 2] mean weights (a1, a2) of the shared and the routed heads,
      which add up to 1; 1/2 where the layer learns none.
  """

  names: tuple[str, ...]
  load: tuple[np.ndarray, ...]
  weights: np.ndarray


class RoutingMaps(NamedTuple):
  """What the tokens of M examples chose.

  Attributes:
    label: [M] label of each example.
    best: for each layer [M, N] int16, the number of the selected head with the
      highest score; -1 for padding, and where none is selected.
    inputs: [M, ...] what the network read: normalized images, or tokens.
    counted: [M, N] bool, False for padding of a text; [M, 1] True where there
      is no padding.
  """

  label: np.ndarray
  best: tuple[np.ndarray, ...]
  inputs: np.ndarray
  counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeadStats:
  """What the routers of a model did with labelled data.

  Attributes:
    layers: the L layers with a router, in order; () of multi-head attention.
    groups: statistics by grouping: "all", then "class" or "text", and others of
      the family, such as "timestep".
    maps: of the first examples of each label.
  """

  layers: tuple[Layer, ...]
  groups: Mapping[str, GroupStats]
  maps: RoutingMaps

  @property
  def labels(self) -> list[str]:
    """Names of the labels of the examples in `maps`."""
    _, groups, *_ = self.groups.values()
    return [groups.names[label] for label in self.maps.label.tolist()]

  def entropy(self) -> np.ndarray:
    """Entropy of each layer's load [L] in [0, 1], see `load_entropy`."""
    loads = zip(self.layers, self.groups["all"].load)
    every = [load_entropy(x[:, one.budget.shared :])[0] for one, x in loads]
    return np.array(every)


def head_stats(
  probe: Probe,
  config: Config,
  params: Any,
  batches: Iterable[Any],
  names: Sequence[str],
  mesh: Mesh,
) -> HeadStats:
  """Measures the use of heads in one pass over labelled batches.

  Args:
    probe: of the family.
    config: of the model.
    params: its parameters, on the mesh.
    batches: global batches on the devices, with "label" [B] int32 and "mask"
      [B] float32, 0 for padded examples, and "index" [B] int32.
    names: of the labels.
    mesh: the devices.

  Raises:
    FloatingPointError: routers give NaN.
    ValueError: there is no example.
  """
  layers = _routed_layers(config, probe)
  groupings = {
    "all": Grouping(("all",), lambda batch: jnp.zeros_like(batch["label"])),
    probe.label: Grouping(tuple(names), lambda batch: batch["label"]),
    **probe.groupings,
  }
  step = _make_step(probe, groupings, mesh)
  total: Any = None
  kept: list[RoutingMaps] = []
  # Labels without a name are in no group, so they have no map either.
  maps, each = _MAPS, -(-_MAPS // max(len(names), 1))
  left = dict.fromkeys(range(len(names)), each)
  for batch in batches:
    sums, chosen = step(params, batch)
    rows = []
    labels, mask = gather((batch["label"], batch["mask"]))
    for row in np.flatnonzero(mask > 0).tolist():
      if maps and left.get(label := int(labels[row]), 0):
        maps, left[label] = maps - 1, left[label] - 1
        rows.append(row)
    if rows:
      part = gather(chosen)
      kept.append(jax.tree.map(lambda x: x[rows], part))  # noqa: B023
    sums = jax.tree.map(on_host, sums)
    total = sums if total is None else jax.tree.map(np.add, total, sums)
  if not kept:
    raise ValueError("there is no example to measure heads on")
  check_finite(total, "the sums of the routers' scores")
  groups = {
    kind: _means(grouping.names, total[kind])
    for kind, grouping in groupings.items()
  }
  found = jax.tree.map(lambda *parts: np.concatenate(parts), *kept)
  best = tuple(
    np.where(best < 0, -1, np.array(layer.order, np.int16)[best])
    for layer, best in zip(layers, found.best)
  )
  return HeadStats(layers, groups, found._replace(best=best))


def _routed_layers(config: Config, probe: Probe) -> tuple[Layer, ...]:
  """The layers of a model that have a router, in order; () without any."""
  model = config.model
  if not model.router.selects:
    return ()
  names = iter(model.layer_budgets())
  groups = model.layer_groups()
  return tuple(
    Layer(next(names), group.budget, group.units(model.router), order, grid)
    for group, grid in itertools.zip_longest(groups, probe.grids)
    for order in group.order_of_each
  )


def _make_step(
  probe: Probe, groupings: Mapping[str, Grouping], mesh: Mesh
) -> Callable[[Any, Batch], tuple[Any, RoutingMaps]]:
  """Jits (params, batch) -> sums by grouping, and what the tokens chose."""

  def step(params: Any, batch: Batch) -> tuple[Any, RoutingMaps]:
    _, recorded = probe.apply(params, batch, mutable=["intermediates"])
    routings = recorded_layers(recorded.get("intermediates", {}), "routing", 3)
    counted = probe.counted(batch)
    sums = {}
    for kind, grouping in groupings.items():
      groups = jax.nn.one_hot(grouping.index(batch), len(grouping.names))
      sums[kind] = [_sums(routing, groups, counted) for routing in routings]
    best = tuple(_best(routing, counted) for routing in routings)
    shown, is_counted = batch[probe.shown], counted > 0
    return sums, RoutingMaps(batch["label"], best, shown, is_counted)

  return jax.jit(step, out_shardings=(replicated(mesh), None))


def _sums(
  routing: Routing, groups: jax.Array, counted: jax.Array
) -> dict[str, jax.Array]:
  """Sums over the tokens of every group.

  Args:
    routing: of a layer.
    groups: [B, G] float32, 1 for the group of an example.
    counted: [B, N] or [B, 1] float32, 0 for tokens that do not count.

  Returns:
    "tokens" [G, 1], "load" [G, H] and "weights" [G, 2], float32.
  """
  shared = jnp.ones_like(routing.shared_scores)
  values = {
    "tokens": jnp.ones_like(routing.gates[..., :1]),
    "load": jnp.concatenate([shared, routing.selected], -1),
    "weights": routing.groups,
  }
  counted = jnp.broadcast_to(counted, routing.gates.shape[:2])

  def total(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.einsum("bg,bn,bnx->gx", groups, counted, x, precision=_EXACT)

  return {name: total(x) for name, x in values.items()}


def _best(routing: Routing, counted: jax.Array) -> jax.Array:
  """[B, N] int16 place of the best selected head in its layer's list, or -1."""
  if not routing.probs.shape[-1]:
    return jnp.full(routing.gates.shape[:2], -1, jnp.int16)
  selected = routing.selected & (counted > 0)[..., None]
  best = jnp.where(selected, routing.probs, -1.0).argmax(-1)
  best = best + routing.shared_scores.shape[-1]
  return jnp.where(selected.any(-1), best, -1).astype(jnp.int16)


def _means(
  names: tuple[str, ...], layers: Sequence[Mapping[str, np.ndarray]]
) -> GroupStats:
  """Means from the sums of every layer."""
  counts = [np.where(x["tokens"] > 0, x["tokens"], np.nan) for x in layers]
  load = tuple(x["load"] / count for x, count in zip(layers, counts))
  weights = [x["weights"] / count for x, count in zip(layers, counts)]
  return GroupStats(names, load, np.reshape(weights, (-1, len(names), 2)))
