"""The load of heads during a run: its entropy, pictures, collapsed routers."""

import itertools
import logging
from collections.abc import Sequence

import jax
import numpy as np

from moh_jax.config import Config, get_family
from moh_jax.ops.head_load import collapse_lines, load_entropy

_LOG = logging.getLogger(__name__)
_BAR, _GAP, _HEIGHT = 12, 4, 100  # pixels of a picture
_COLOR, _EVEN = (0, 114, 178), (213, 94, 0)  # told apart by all eyes


class HeadWatch:
  """Watches whether the tokens of a run use all routed heads."""

  def __init__(self, config: Config):
    """Reads the head budgets of the layers.

    Args:
      config: of the run.
    """
    model = config.model
    budgets = get_family(model.family).layer_budgets(model)
    orders = (x for g in model.layer_groups() for x in g.order_of_each)
    # Numbers of the routed heads, [] where no token chooses.
    self._routed = {
      name: sorted(order[budget.shared :]) if budget.top_k else []
      for (name, budget), order in zip(budgets.items(), orders, strict=True)
    }
    self._every, self._steps = config.log.heads, config.train.steps
    self._bound = config.log.collapse_entropy
    self._collapsed: set[str] = set()

  def due(self, step: int) -> bool:
    """Whether the load of every head is recorded after a step."""
    every = self._every
    return bool(every) and (step % every == 0 or step == self._steps)

  def by_layer(self, stacks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Loads [R] of the routed heads of every layer that routes, by its name.

    Heads are in the order of their numbers, also where `model.head_order`
    shares others than the first.

    Args:
      stacks: for each stack of layers [layers, H], see `step.HeadLoads`.
    """
    layers = itertools.chain.from_iterable(stacks)
    return {
      name: np.asarray(load)[heads]
      for (name, heads), load in zip(self._routed.items(), layers)
      if heads
    }

  def metrics(
    self, step: int, stacks: Sequence[np.ndarray]
  ) -> dict[str, float]:
    """The smallest entropy of a layer's load, and how many have collapsed.

    A router that has just collapsed gets a line in the log.

    Args:
      step: optimizer steps done.
      stacks: as for `by_layer`.
    """
    entropies = {
      name: float(load_entropy(load))
      for name, load in self.by_layer(stacks).items()
    }
    collapsed = {n: e for n, e in entropies.items() if e < self._bound}
    new = {n: e for n, e in collapsed.items() if n not in self._collapsed}
    if jax.process_index() == 0:  # all processes know the same loads
      for line in collapse_lines(new, self._bound):
        _LOG.warning("step %d: %s", step, line)
    self._collapsed = set(collapsed)
    return {
      "load_entropy": min(entropies.values()),
      "collapsed_routers": float(len(collapsed)),
    }


def load_picture(load: np.ndarray) -> np.ndarray:
  """A bar for the load of each routed head, with a line at the even load.

  Args:
    load: [R] share of tokens in [0, 1].

  Returns:
    [rows, columns, 3] uint8.
  """
  width = len(load) * (_BAR + _GAP) + _GAP
  picture = np.full((_HEIGHT, width, 3), 255, np.uint8)
  for head, share in enumerate(load):
    start = _GAP + head * (_BAR + _GAP)
    height = round(float(share) * _HEIGHT)
    picture[_HEIGHT - height :, start : start + _BAR] = _COLOR
  even = round(float(np.mean(load)) * (_HEIGHT - 1))
  picture[_HEIGHT - 1 - even] = _EVEN
  return picture
