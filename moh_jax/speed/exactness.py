"""Checks that a timed program computes what the dense form computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest allowed relative errors of outputs and of gradients, by dtype.
LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}


def compare(
  found: tuple[Any, Any], expected: tuple[Any, Any], dtype: str
) -> tuple[float, str | None]:
  """Measures the errors of a program's (outputs, gradients).

  Args:
    found: two trees of arrays, from the timed program.
    expected: the same trees from the dense form; gradients may be empty.
    dtype: compute dtype, which decides how large an error may be.

  Returns:
    The larger of both relative errors, see `relative_error`, NaN if one is NaN;
    and which of them exceeds its limit, in words, None if none does.
  """
  errors = [relative_error(*parts) for parts in zip(found, expected)]
  fault = None
  parts = zip(("outputs", "gradients"), errors, LIMITS[dtype])
  for name, error, limit in parts:
    if not fault and not error <= limit:  # so that NaN is a fault
      fault = f"relative error of the {name} {error:.1e} is above {limit:.0e}"
  return float(np.max(errors)), fault


def relative_error(found: Any, expected: Any) -> float:
  """Largest absolute difference over the largest expected magnitude.

  It is computed for each array, and the largest of the tree is returned. Where
  all expected values are 0, it is the absolute difference.

  Args:
    found: tree of arrays, of any floating dtype.
    expected: tree of the same structure and shapes.
  """
  errors = jax.tree.map(_relative, found, expected)
  return float(np.max(jax.tree.leaves(errors), initial=0.0))


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
  found, expected = (x.astype(jnp.float32) for x in (found, expected))
  largest = jnp.abs(expected).max()
  difference = jnp.abs(found - expected).max()
  return difference / jnp.where(largest > 0, largest, 1.0)
