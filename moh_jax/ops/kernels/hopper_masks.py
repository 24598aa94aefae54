"""How the Hopper kernels hide keys from rows.

Shapes as in `hopper`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moh_jax.ops.kernels.hopper_program import Program, spread


class Masks(NamedTuple):
  """What hides keys; None where nothing of the kind does.

  A row sees a key of its range [begin, end) if their codes are equal.

  Attributes:
    begin: [T * R] int32, the first key of each row.
    end: [T * R] int32, the end of the keys of each row.
    row_codes: [T * R] int32.
    key_codes: [B, J * L] int32.
  """

  begin: Any = None
  end: Any = None
  row_codes: Any = None
  key_codes: Any = None


def masks(program: Program) -> Masks:
  """What hides keys from the rows of a call."""
  problem = program.problem
  if not (problem.visible.causal or problem.masks_by_value):
    return Masks()
  ranges = problem.row_ranges()
  end = ranges.end.reshape(-1)
  if not problem.masks_by_value:
    return Masks(end=end)
  key_codes, row_codes = problem.visible.segments, problem.row_masks()[1]
  if key_codes is None:
    key_codes = jnp.zeros((problem.batch, problem.keys), jnp.int32)
    row_codes = jnp.zeros_like(end)
  if problem.visible.key_mask is not None:
    hidden = jnp.iinfo(jnp.int32).min
    key_codes = jnp.where(problem.visible.key_mask, key_codes, hidden)
  more = program.key_tiles * program.keys - problem.keys
  key_codes = jnp.pad(key_codes, ((0, 0), (0, more)))
  return Masks(ranges.begin.reshape(-1), end, row_codes, key_codes)


def hide(
  program: Program,
  logits: jax.Array,
  masks: Masks,
  first: jax.Array,
  *,
  rows_axis: int,
) -> jax.Array:
  """Sets logits to -inf where a row does not see a key.

  Args:
    program: the kernel.
    logits: [X, Y].
    masks: arrays in registers, for the rows and keys of the logits.
    first: the first of the keys.
    rows_axis: 0 or 1, which axis are the rows.
  """
  shape = logits.shape
  by_row = functools.partial(spread, shape=shape, axis=rows_axis)
  by_key = functools.partial(spread, shape=shape, axis=1 - rows_axis)
  key = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
  key = program.as_matrix(key) + first
  end = program.problem.keys if masks.end is None else by_row(masks.end)
  seen = key < end
  if masks.begin is not None:
    seen &= key >= by_row(masks.begin)
  if masks.row_codes is not None:
    seen &= by_row(masks.row_codes) == by_key(masks.key_codes)
  return jnp.where(seen, logits, -jnp.inf)
