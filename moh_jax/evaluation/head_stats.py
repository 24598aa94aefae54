"""Statistics of routed heads: which heads the tokens of each group use.

One pass over labelled examples. The devices reduce every batch to sums over
tokens, so memory is that of one batch, whatever the number of examples.

Shapes: L layers, G groups, H heads, R routed ones, B examples, N tokens. Heads
are listed as the router does, the shared ones first.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.heads import HeadBudget
from moh_jax.evaluation.probe import Batch, Grouping, Probe
from moh_jax.ops.routing import Routing, collapse_lines, load_entropy
from moh_jax.runtime import sharding

# What is averaged over the tokens of a group, for every head.
VALUES = ("load", "score", "gate")
_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer whose router was watched.

  Attributes:
    name: of its stack and its place in it, such as "stage1.0".
    budget: its head split.
    order: [H] number of each listed head, not 0, 1, ... where
      `model.head_order` chooses the shared heads.
    grid: rows and columns of its tokens, None for text.
  """

  name: str
  budget: HeadBudget
  order: tuple[int, ...]
  grid: tuple[int, int] | None = None


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


@dataclasses.dataclass(frozen=True)
class RoutingMaps:
  """What the tokens of M examples chose.

  Attributes:
    index: [M] position of each example in the data.
    label: [M] its label.
    best: for each layer [M, N] int16, the place in the layer's list of the
      selected head with the highest score; -1 for padding, and where none is
      selected.
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

  def entropy(self, kind: str = "all") -> np.ndarray:
    """Entropy of the load [L, G] in [0, 1], see `load_entropy`."""
    groups = self.groups[kind]
    out = np.empty(groups.tokens.shape)
    for row, layer, load in zip(out, self.layers, groups.load):
      row[:] = load_entropy(load[:, layer.budget.shared :])
    return out

  def collapsed(self, bound: float) -> list[str]:
    """A line for each layer whose load has an entropy under `bound`."""
    names = [layer.name for layer in self.layers]
    return collapse_lines(dict(zip(names, self.entropy()[:, 0])), bound)


def routed_layers(config: Config, probe: Probe) -> tuple[Layer, ...]:
  """The layers of a model that have a router, in order; () without any."""
  model = config.model
  if model.router.kind == "none":
    return ()
  budgets = model.layer_budgets()
  groups = model.layer_groups()
  orders = (order for group in groups for order in group.order_of_each)
  grids = [g for g, x in zip(probe.grids, groups) for _ in range(x.depth)]
  return tuple(
    Layer(name, budget, order, grid)
    for (name, budget), order, grid in zip(
      budgets.items(), orders, grids or [None] * len(budgets)
    )
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
  kept: list[dict[str, Any]] = []
  wanted = _Wanted(maps, len(names))
  for batch in batches:
    sums, chosen = step(params, batch)
    rows = wanted.rows(*sharding.gather((batch["label"], batch["mask"]), mesh))
    if len(rows):
      part = sharding.gather(chosen, mesh)
      kept.append(jax.tree.map(lambda x: x[rows], part))  # noqa: B023
    sums = jax.tree.map(_on_host, sums)
    total = sums if total is None else jax.tree.map(np.add, total, sums)
  if not kept:
    raise ValueError("there is no example to measure heads on")
  groups = {
    kind: _means(grouping.names, total[kind])
    for kind, grouping in groupings.items()
  }
  whole = jax.tree.map(lambda *parts: np.concatenate(parts), *kept)
  return HeadStats(layers, groups, RoutingMaps(**whole))


class _Wanted:
  """Chooses the examples whose maps are kept: the first ones of each label."""

  def __init__(self, examples: int, labels: int):
    self._missing = examples
    each = -(-examples // max(labels, 1))
    self._of_label = dict.fromkeys(range(labels), each)

  def rows(self, labels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The rows of a batch that are kept."""
    rows = []
    for row in np.flatnonzero(mask > 0).tolist():
      label = int(labels[row])
      # Labels without a name are in no group, so they have no map either.
      if self._missing and self._of_label.get(label, 0):
        self._missing -= 1
        self._of_label[label] -= 1
        rows.append(row)
    return np.array(rows, int)


def recorded_layers(recorded: Any, name: str, rank: int) -> list[Any]:
  """What layers recorded under a name, in the order of the layers.

  Args:
    recorded: a collection of a network, such as its "intermediates".
    name: what was recorded.
    rank: dimensions of its arrays, without that of stacked layers.

  Returns:
    A value for each stack of equal layers, with a leading layer axis; layers
    that no scan stacks have one of length 1.
  """
  flat = traverse_util.flatten_dict(recorded)
  found = {"/".join(path): x for path, x in flat.items() if path[-1] == name}

  def place(path: str) -> list[Any]:  # "blocks10" comes after "blocks2"
    parts = re.split(r"(\d+)", path)
    return [int(part) if part.isdecimal() else part for part in parts]

  return [
    jax.tree.map(lambda x: x[None] if x.ndim == rank else x, found[path][0])
    for path in sorted(found, key=place)
  ]


def _make_step(
  probe: Probe, groupings: Mapping[str, Grouping], mesh: Mesh
) -> Callable[[Any, Batch], tuple[Any, dict[str, Any]]]:
  """Jits (params, batch) -> sums by grouping, and what the tokens chose."""

  def step(params: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    _, recorded = probe.apply(params, batch, mutable=["intermediates"])
    routings = recorded_layers(recorded.get("intermediates", {}), "routing", 3)
    counted = batch["mask"][:, None]
    if probe.token_mask is not None:
      counted = counted * probe.token_mask(batch)
    examples = [_example_sums(routing, counted) for routing in routings]
    sums = {}
    for kind, grouping in groupings.items():
      number = len(grouping.names)
      groups = jax.nn.one_hot(grouping.index(batch), number)  # [B, G]
      sums[kind] = jax.tree.map(
        lambda x: jnp.einsum("bg,lb...->lg...", groups, x, precision=_EXACT),  # noqa: B023
        examples,
      )
    chosen = [_chosen(routing, counted) for routing in routings]
    maps = {
      "index": batch["index"],
      "label": batch["label"],
      "inputs": batch[probe.shown],
      "counted": counted > 0,
      "best": tuple(best for pair in chosen for best in pair[0]),
      "selected": tuple(mask for pair in chosen for mask in pair[1]),
    }
    return sums, maps

  return jax.jit(step, out_shardings=(sharding.replicated(mesh), None))


def _example_sums(routing: Routing, counted: jax.Array) -> dict[str, jax.Array]:
  """Sums over the tokens of every example.

  Args:
    routing: of a stack, with a leading layer axis.
    counted: [B, N] or [B, 1] float32, 0 for tokens that do not count.

  Returns:
    "tokens" [L, B], the `VALUES` [L, B, H] and "weights" [L, B, 2], float32.
  """
  counted = jnp.broadcast_to(counted, routing.probs.shape[1:3])
  shared = jnp.ones_like(routing.shared_scores)

  def over_tokens(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.einsum("lbnx,bn->lbx", x, counted, precision=_EXACT)

  values = {
    "load": (shared, routing.selected),
    "score": (routing.shared_scores, routing.probs),
    "gate": (routing.gates,),
    "weights": (routing.groups,),
  }
  tokens = jnp.broadcast_to(counted.sum(-1)[None], routing.probs.shape[:2])
  return {
    "tokens": tokens,
    **{
      name: jnp.concatenate([over_tokens(part) for part in parts], -1)
      for name, parts in values.items()
    },
  }


def _chosen(
  routing: Routing, counted: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
  """For every layer of a stack `best` [B, N] and `selected` [B, N, R]."""
  depth, *shape, _ = routing.selected.shape
  counted = jnp.broadcast_to(counted, shape)
  selected = routing.selected & (counted > 0)[None, ..., None]
  # A column before the heads is the best where there is no head to select.
  scores = jnp.where(selected, routing.probs, -1.0)
  scores = jnp.pad(scores, [(0, 0)] * 3 + [(1, 0)], constant_values=-1.0)
  best = scores.argmax(-1) - 1 + routing.shared_scores.shape[-1]
  best = jnp.where(selected.any(-1), best, -1).astype(jnp.int16)
  return [best[i] for i in range(depth)], [selected[i] for i in range(depth)]


def _on_host(x: jax.Array) -> np.ndarray:
  """A replicated array on the host, wide enough for sums of many batches."""
  return np.asarray(x.addressable_data(0), np.float64)


def _means(
  names: tuple[str, ...], stacks: Sequence[Mapping[str, np.ndarray]]
) -> GroupStats:
  """Means from the sums of every stack of layers."""
  tokens = [np.empty((0, len(names))), *(stack["tokens"] for stack in stacks)]
  tokens = np.concatenate(tokens)

  def means(name: str) -> tuple[np.ndarray, ...]:
    sums = [layer for stack in stacks for layer in stack[name]]
    counts = np.where(tokens > 0, tokens, np.nan)
    return tuple(layer / count[:, None] for layer, count in zip(sums, counts))

  values = {name: means(name) for name in VALUES}
  weights = np.reshape(means("weights"), (-1, len(names), 2))
  return GroupStats(names, tokens, **values, weights=weights)
