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

  A row sees the keys before its end that have its code.

  Attributes:
    end: [T * R] int32, where the keys of each row end; None is M.
    row_codes: [T * R] int32.
    key_codes: [B, J * L] int32.
  """

  end: Any = None
  row_codes: Any = None
  key_codes: Any = None


def masks(program: Program) -> Masks:
  """What hides keys from the rows of a call."""
  problem = program.problem
  last, row_codes = problem.row_masks()
  end = None if last is None else last + 1
  if not problem.masks_by_value:
    return Masks(end)
  key_codes = problem.visible.segments
  if key_codes is None:
    key_codes = jnp.zeros((problem.batch, problem.keys), jnp.int32)
    row_codes = jnp.zeros(problem.num_blocks * problem.rows, jnp.int32)
  hidden = jnp.iinfo(jnp.int32).min
  if problem.visible.key_mask is not None:
    key_codes = jnp.where(problem.visible.key_mask, key_codes, hidden)
  more = program.key_tiles * program.keys - problem.keys
  key_codes = jnp.pad(key_codes, ((0, 0), (0, more)), constant_values=hidden)
  return Masks(end, row_codes, key_codes)


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
  seen = None
  if masks.row_codes is not None:
    seen = by_row(masks.row_codes) == by_key(masks.key_codes)
  if masks.end is not None or seen is None:
    key = lax.broadcasted_iota(jnp.int32, shape, 1 - rows_axis)
    key = program.as_matrix(key) + first
    end = program.problem.keys if masks.end is None else by_row(masks.end)
    seen = key < end if seen is None else seen & (key < end)
  return jnp.where(seen, logits, -jnp.inf)
