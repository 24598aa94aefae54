"""Names for values that rematerialization keeps instead of recomputing."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"


def keep_attention(x: Any) -> Any:
  """Names the results that the gradients of attention need.

  The remat policy "dots" keeps values of this name: recomputing them would run
  the whole attention again.

  Args:
    x: a pytree of arrays.

  Returns:
    The same arrays, named `ATTENTION`.
  """
  return jax.tree.map(lambda leaf: checkpoint_name(leaf, ATTENTION), x)
