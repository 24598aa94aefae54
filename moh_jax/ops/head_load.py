"""How evenly tokens spread over the routed heads of a layer, on the host."""

from collections.abc import Mapping

import numpy as np

LOAD_SPLIT = "heads"  # split of the rows of metrics.jsonl that hold loads


def load_entropy(load: np.ndarray) -> np.ndarray:
  """Entropy of a layer's load, scaled to [0, 1].

  The loads of k heads per token, divided by k, are a distribution. Its entropy
  is log k at least, where every token selects the same k heads, which is 0
  here, and log R at most, where all heads are selected equally often, which is
  1 here.

  Args:
    load: [..., R] share of tokens that select each routed head; the sum over R
      is the number of heads that a token selects.

  Returns:
    [...] float64; NaN where no token was counted or none selects a head, and 1
    where tokens have no choice since they select all heads.
  """
  load = np.asarray(load, np.float64)
  heads = load.shape[-1]
  selected = load.sum(-1, keepdims=True)
  counted = selected > 0
  share = load / np.where(counted, selected, 1.0)
  logs = np.log(np.where(share > 0, share, 1.0))
  entropy = -(share * logs).sum(-1)
  least = np.log(np.where(counted, selected, 1.0))[..., 0]
  span = np.log(max(heads, 1)) - least
  has_choice = span > 1e-6
  scaled = (entropy - least) / np.where(has_choice, span, 1.0)
  scaled = np.where(has_choice, np.clip(scaled, 0.0, 1.0), 1.0)
  return np.where(counted[..., 0], scaled, np.nan)


def collapse_lines(entropies: Mapping[str, float], bound: float) -> list[str]:
  """What to say of collapsed routers: a line for each.

  Args:
    entropies: of every layer's load, see `load_entropy`.
    bound: a router whose load has a smaller entropy has collapsed.
  """
  return [
    f"the router of layer {name} has collapsed: nearly all tokens select the "
    f"same heads (entropy of the load {entropy:.3f}, under {bound:g})"
    for name, entropy in entropies.items()
    if entropy < bound
  ]
