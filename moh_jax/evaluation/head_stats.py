"""Statistics of routed heads: which heads the tokens of each group use.

One pass over labelled examples. The devices reduce every batch to sums over
tokens, so memory is that of one batch, whatever the number of examples.

Shapes: L layers, G groups, H heads, R routed ones, B examples, N tokens. Heads
are listed as the router does, the shared ones first.
"""

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from moh_jax.runtime import sharding

# What is averaged over the tokens of a group, for every head.
VALUES = ("load", "score", "gate")
# Columns of `table_rows`.
HEADER = ("grouping", "group", "layer", "head", "kind", "tokens", *VALUES)
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


@dataclasses.dataclass(frozen=True)
class GroupStats:
  """Means over the tokens of each group, float64; NaN for a group without any.

  Attributes:
    names: of the G groups.
    tokens: [L, G] tokens that were counted.
    load: for each layer [G, H] share of tokens that use each head: 1 for shared
      heads; the sum over the routed ones is top_k.
    score: for each layer [G, H] mean softmax score of each head among the
      shared or among the routed heads.
    gate: for each layer [G, H] mean weight of each head's output, 0 where a
      token does not use it.
    weights: [L, G, 2] mean weights (a1, a2) of the shared and the routed heads,
      which add up to 1; 1/2 where the layer learns none.
  """

  names: tuple[str, ...]
  tokens: np.ndarray
  load: tuple[np.ndarray, ...]
  score: tuple[np.ndarray, ...]
  gate: tuple[np.ndarray, ...]
  weights: np.ndarray


class RoutingMaps(NamedTuple):
  """What the tokens of M examples chose.

  Attributes:
    index: [M] position of each example in the data.
    label: [M] its label.
    best: for each layer [M, N] int16, the number of the selected head with the
      highest score; -1 for padding, and where none is selected.
    selected: for each layer [M, N, R] bool.
    inputs: [M, ...] what the network read: normalized images, or tokens.
    counted: [M, N] bool, False for padding of a text; [M, 1] True where there
      is no padding.
  """

  index: np.ndarray
  label: np.ndarray
  best: tuple[np.ndarray, ...]
  selected: tuple[np.ndarray, ...]
  inputs: np.ndarray
  counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class HeadStats:
  """What the routers of a model did with labelled data.

  Attributes:
    layers: the L layers with a router, in order; () of multi-head attention.
    groups: statistics by grouping: "all", then "class" or "task", and others of
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

  def entropy(self, kind: str = "all") -> np.ndarray:
    """Entropy of the load [L, G] in [0, 1], see `load_entropy`."""
    groups = self.groups[kind]
    out = np.empty(groups.tokens.shape)
    for row, layer, load in zip(out, self.layers, groups.load):
      row[:] = load_entropy(load[:, layer.budget.shared :])
    return out


def routed_layers(config: Config, probe: Probe) -> tuple[Layer, ...]:
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


def head_stats(
  probe: Probe,
  config: Config,
  params: Any,
  batches: Iterable[Any],
  names: Sequence[str],
  mesh: Mesh,
  *,
  maps: int = 8,
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
    maps: examples whose routing maps are kept, about as many of each label.

  Raises:
    FloatingPointError: routers give NaN.
    ValueError: there is no example.
  """
  layers = routed_layers(config, probe)
  groupings = {
    "all": Grouping(("all",), lambda batch: jnp.zeros_like(batch["label"])),
    probe.label: Grouping(tuple(names), lambda batch: batch["label"]),
    **probe.groupings,
  }
  step = _make_step(probe, groupings, mesh)
  total: Any = None
  kept: list[RoutingMaps] = []
  # Labels without a name are in no group, so they have no map either.
  left = dict.fromkeys(range(len(names)), -(-maps // max(len(names), 1)))
  for batch in batches:
    sums, chosen = step(params, batch)
    rows = []
    labels, mask = sharding.gather((batch["label"], batch["mask"]))
    for row in np.flatnonzero(mask > 0).tolist():
      if maps and left.get(label := int(labels[row]), 0):
        maps, left[label] = maps - 1, left[label] - 1
        rows.append(row)
    if rows:
      part = sharding.gather(chosen)
      kept.append(jax.tree.map(lambda x: x[rows], part))  # noqa: B023
    sums = jax.tree.map(on_host, sums)
    total = sums if total is None else jax.tree.map(np.add, total, sums)
  if not kept:
    raise ValueError("there is no example to measure heads on")
  sharding.check_finite(total, "the sums of the routers' scores")
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
    chosen = [_chosen(routing, counted) for routing in routings]
    best, selected = zip(*chosen) if chosen else ((), ())
    shown, is_counted = batch[probe.shown], counted > 0
    of_batch = batch["index"], batch["label"], best, selected, shown, is_counted
    return sums, RoutingMaps(*of_batch)

  return jax.jit(step, out_shardings=(sharding.replicated(mesh), None))


def _sums(
  routing: Routing, groups: jax.Array, counted: jax.Array
) -> dict[str, jax.Array]:
  """Sums over the tokens of every group.

  Args:
    routing: of a layer.
    groups: [B, G] float32, 1 for the group of an example.
    counted: [B, N] or [B, 1] float32, 0 for tokens that do not count.

  Returns:
    "tokens" [G, 1], the `VALUES` [G, H] and "weights" [G, 2], float32.
  """
  shared = jnp.ones_like(routing.shared_scores)
  values = {
    "tokens": jnp.ones_like(routing.gates[..., :1]),
    "load": jnp.concatenate([shared, routing.selected], -1),
    "score": jnp.concatenate([routing.shared_scores, routing.probs], -1),
    "gate": routing.gates,
    "weights": routing.groups,
  }
  counted = jnp.broadcast_to(counted, routing.gates.shape[:2])

  def total(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.einsum("bg,bn,bnx->gx", groups, counted, x, precision=_EXACT)

  return {name: total(x) for name, x in values.items()}


def _chosen(
  routing: Routing, counted: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The place of a layer's best head in its list, and what is selected.

  Returns:
    [B, N] int16, -1 where no head is selected, and [B, N, R] bool.
  """
  selected = routing.selected & (counted > 0)[..., None]
  # A column before the heads is the best where there is no head to select.
  scores = jnp.where(selected, routing.probs, -1.0)
  scores = jnp.pad(scores, [(0, 0)] * 2 + [(1, 0)], constant_values=-1.0)
  best = scores.argmax(-1) - 1 + routing.shared_scores.shape[-1]
  return jnp.where(selected.any(-1), best, -1).astype(jnp.int16), selected


def _means(
  names: tuple[str, ...], layers: Sequence[Mapping[str, np.ndarray]]
) -> GroupStats:
  """Means from the sums of every layer."""
  tokens = np.reshape([x["tokens"] for x in layers], (-1, len(names)))

  def means(name: str) -> tuple[np.ndarray, ...]:
    counts = np.where(tokens > 0, tokens, np.nan)[..., None]
    return tuple(x[name] / count for x, count in zip(layers, counts))

  values = {name: means(name) for name in VALUES}
  weights = np.reshape(means("weights"), (-1, len(names), 2))
  return GroupStats(names, tokens, **values, weights=weights)


def table_rows(stats: HeadStats) -> Iterator[tuple[Any, ...]]:
  """A row of `HEADER` for each head of each layer, by group.

  Heads have their own numbers. Values of a group without tokens are "".
  """
  for kind, groups in stats.groups.items():
    for g, name in enumerate(groups.names):
      for place, layer in enumerate(stats.layers):
        tokens = int(groups.tokens[place, g])
        for head, number in enumerate(layer.order):
          values = [getattr(groups, v)[place][g, head] for v in VALUES]
          yield (
            *(kind, name, layer.name, number),
            "shared" if head < layer.budget.shared else "routed",
            tokens,
            *(f"{value:.6g}" if tokens else "" for value in values),
          )


def to_npz(stats: HeadStats) -> bytes:
  """The content of an npz file with all statistics and maps.

  Arrays of layers are filled up with NaN (maps with -1, False) to the largest
  number of heads and tokens. "layers" has the layers' names and "order" the
  numbers of the listed heads; for a grouping such as "class" there are
  "class/names" [G], "class/tokens" [L, G], "class/load", "class/score" and
  "class/gate" [L, G, H], "class/weights" [L, G, 2] and "class/entropy" [L, G];
  "maps/best" [L, M, N] (numbers of heads), "maps/selected" [L, M, N, H] (as
  listed), "maps/index" [M], "maps/label" [M] and "maps/inputs".
  """
  layers, maps = stats.layers, stats.maps
  selected = [
    np.pad(chosen, ((0, 0), (0, 0), (layer.budget.shared, 0)))
    for chosen, layer in zip(maps.selected, layers)
  ]
  arrays = {
    "layers": np.array([layer.name for layer in layers]),
    "order": _filled([np.array(layer.order) for layer in layers], -1),
    "shared": np.array([layer.budget.shared for layer in layers]),
    "top_k": np.array([layer.budget.top_k for layer in layers]),
    "maps/best": _filled(maps.best, -1),
    "maps/selected": _filled(selected, False),
    **{f"maps/{n}": getattr(maps, n) for n in ("index", "label", "inputs")},
  }
  for kind, groups in stats.groups.items():
    arrays[f"{kind}/names"] = np.array(groups.names)
    arrays[f"{kind}/tokens"] = groups.tokens.astype(np.int64)
    arrays[f"{kind}/weights"] = groups.weights
    arrays[f"{kind}/entropy"] = stats.entropy(kind)
    for name in VALUES:
      arrays[f"{kind}/{name}"] = _filled(getattr(groups, name), np.nan)
  stream = io.BytesIO()
  np.savez_compressed(stream, **arrays)
  return stream.getvalue()


def _filled(parts: Any, value: Any) -> np.ndarray:
  """Stacks arrays of one rank, each filled up at the ends of its axes."""
  if not parts:
    return np.empty(0)
  shape = np.max([part.shape for part in parts], axis=0)
  out = np.full((len(parts), *shape), value, parts[0].dtype)
  for row, part in zip(out, parts):
    row[tuple(map(slice, part.shape))] = part
  return out
