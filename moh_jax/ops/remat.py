"""What a backward pass keeps of an operation that it would compute again."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"


def keep_attention(x: Any) -> Any:
  """Names arrays that gradients of attention need beside its inputs.

  The remat policy "dots" keeps them: to compute them again is to run the whole
  attention again.

  Args:
    x: arrays; a pytree.

  Returns:
    The same, named `ATTENTION`.
  """
  return jax.tree.map(lambda leaf: checkpoint_name(leaf, ATTENTION), x)
