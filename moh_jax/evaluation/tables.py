"""Head statistics as a table (CSV) and as arrays (npz)."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from moh_jax.evaluation.head_stats import VALUES, HeadStats

HEADER = ("grouping", "group", "layer", "head", "kind", "tokens", *VALUES)


def rows(stats: HeadStats) -> Iterator[tuple[Any, ...]]:
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
  "maps/best" [L, M, N], "maps/selected" [L, M, N, H], "maps/index" [M],
  "maps/label" [M] and "maps/inputs".
  """
  arrays = {
    "layers": np.array([layer.name for layer in stats.layers]),
    "order": _filled([np.array(layer.order) for layer in stats.layers], -1),
    "shared": np.array([layer.budget.shared for layer in stats.layers]),
    "top_k": np.array([layer.budget.top_k for layer in stats.layers]),
  }
  for kind, groups in stats.groups.items():
    arrays |= {
      f"{kind}/names": np.array(groups.names),
      f"{kind}/tokens": groups.tokens.astype(np.int64),
      f"{kind}/weights": groups.weights,
      f"{kind}/entropy": stats.entropy(kind),
    }
    for name in VALUES:
      arrays[f"{kind}/{name}"] = _filled(getattr(groups, name), np.nan)
  maps = stats.maps
  selected = [
    np.pad(chosen, ((0, 0), (0, 0), (layer.budget.shared, 0)))
    for chosen, layer in zip(maps.selected, stats.layers)
  ]
  arrays |= {
    "maps/best": _filled(maps.best, -1),
    "maps/selected": _filled(selected, False),
    "maps/index": maps.index,
    "maps/label": maps.label,
    "maps/inputs": maps.inputs,
  }
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
