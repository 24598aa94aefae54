"""Whether what is timed also computes the right thing."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# dtype -> the largest relative errors of outputs and of gradients.
LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}


@dataclasses.dataclass(frozen=True)
class Errors:
  """Relative errors against the dense form, see `relative_error`.

  Attributes:
    outputs: of the outputs.
    gradients: the largest of any gradient; None where there are none.
  """

  outputs: float
  gradients: float | None = None

  @property
  def largest(self) -> float:
    """Of both; NaN where one is."""
    return float(np.max([self.outputs, self.gradients or 0.0]))

  def fault(self, dtype: str) -> str | None:
    """Says what is above the limits of a dtype; None where nothing is."""
    for name, limit in zip(("outputs", "gradients"), LIMITS[dtype]):
      error = getattr(self, name)
      if error is not None and not error <= limit:  # NaN is a fault too
        return f"relative error of the {name} {error:.1e} is above {limit:.0e}"
    return None


def compare(found: tuple[Any, Any], expected: tuple[Any, Any]) -> Errors:
  """Compares (outputs, gradients), two trees each.

  Args:
    found: of what is timed.
    expected: the same trees; empty gradients are not compared.
  """
  outputs, gradients = (relative_error(*p) for p in zip(found, expected))
  return Errors(outputs, gradients if jax.tree.leaves(expected[1]) else None)


def relative_error(found: Any, expected: Any) -> float:
  """Largest difference of an array over its largest value, worst of a tree.

  Args:
    found: a tree of arrays.
    expected: the same, of any floating dtype.
  """
  errors = jax.tree.map(_relative, found, expected)
  return float(np.max(jax.tree.leaves(errors), initial=0.0))


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
  found, expected = (x.astype(jnp.float32) for x in (found, expected))
  largest = jnp.abs(expected).max()
  difference = jnp.abs(found - expected).max()
  return difference / jnp.where(largest > 0, largest, 1.0)
