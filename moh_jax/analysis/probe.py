"""How the heads of a family's network are watched on labelled examples."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

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
    label: what a label of the data stands for, "class" or "task".
    groupings: further groupings by name, such as the timesteps of diffusion.
    token_mask: batch -> [B, N] bool, False for padding; None counts all tokens.
    grids: rows and columns of the tokens in each group of equal layers, where
      they are patches of an image; () for text.
  """

  apply: Callable[..., Any]
  shown: str = "image"
  label: str = "class"
  groupings: Mapping[str, Grouping] = dataclasses.field(default_factory=dict)
  token_mask: Callable[[Batch], jax.Array] | None = None
  grids: tuple[tuple[int, int], ...] = ()
