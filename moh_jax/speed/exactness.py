"""Checks that a timed program computes what the dense form computes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest allowed relative errors of outputs and of gradients, by dtype.
LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}


@dataclasses.dataclass(frozen=True)
class Errors:
  """Relative errors against the dense form, see `relative_error`.

  Attributes:
    outputs: relative error of the outputs.
    gradients: largest relative error of a gradient; None without gradients.
  """

  outputs: float
  gradients: float | None = None

  @property
  def largest(self) -> float:
    """The larger of both errors; NaN if one is NaN."""
    return float(np.max([self.outputs, self.gradients or 0.0]))

  def fault(self, dtype: str) -> str | None:
    """Names the error that exceeds the limit of a dtype; None if none does."""
    for name, limit in zip(("outputs", "gradients"), LIMITS[dtype]):
      error = getattr(self, name)
      if error is not None and not error <= limit:  # so that NaN is a fault
        return f"relative error of the {name} {error:.1e} is above {limit:.0e}"
    return None


def compare(found: tuple[Any, Any], expected: tuple[Any, Any]) -> Errors:
  """Measures the errors of a program's (outputs, gradients).

  Args:
    found: two trees of arrays, from the timed program.
    expected: the same trees from the dense form; gradients may be empty.
  """
  outputs, gradients = (relative_error(*p) for p in zip(found, expected))
  return Errors(outputs, gradients if jax.tree.leaves(expected[1]) else None)


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
