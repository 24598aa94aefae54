"""The most bytes that a program's intermediate arrays take at one time.

Estimated from the program as JAX traces it, without a compiler: every array
lives from the operation that makes it to its last use, in the traced order.
Operations on single elements are taken to be fused with the one that uses their
result, so these results take no memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core

Size = Callable[[Any], float]

# A compiler recomputes these where they are read, or makes no new array.
_FREE = {
  "broadcast_in_dim",
  "convert_element_type",
  "expand_dims",
  "iota",
  "name",
  "optimization_barrier",
  "pvary",
  "reshape",
  "sharding_constraint",
  "squeeze",
  "stop_gradient",
}
# Several elements of an input make one of the output, or elements move.
_MAKES_ARRAYS = {
  "concatenate",
  "conv_general_dilated",
  "cumsum",
  "dot_general",
  "dynamic_slice",
  "dynamic_update_slice",
  "gather",
  "pallas_call",
  "scatter",
  "scatter-add",
  "sort",
  "top_k",
}


def peak_bytes(jaxpr: Any, size: Size) -> float:
  """The most bytes that live at one time, results included, inputs not.

  Args:
    jaxpr: `jax.extend.core.Jaxpr` of a program.
    size: bytes that an abstract array takes.
  """
  uses = _uses(jaxpr)
  # Variable -> arrays in memory that it is computed from when it is read.
  holders: dict[Any, frozenset[Any]] = {}
  last = _last_uses(jaxpr, uses, holders, size)
  sizes: dict[Any, float] = {}
  live = peak = 0.0
  for index, eqn in enumerate(jaxpr.eqns):
    made = [v for v in eqn.outvars if holders.get(v) == frozenset([v])]
    for variable in made:
      sizes[variable] = size(variable.aval)
    live += sum(sizes[v] for v in made)
    peak = max(peak, live + _inside(eqn, size))
    for variable in {v for v in last.get(index, ()) if v in sizes}:
      live -= sizes.pop(variable)
  return peak


def _uses(jaxpr: Any) -> dict[Any, int]:
  """How often each variable is read; results are read once more."""
  uses: dict[Any, int] = {}
  reads = [eqn.invars for eqn in jaxpr.eqns]
  for variables in (*reads, jaxpr.outvars, jaxpr.outvars):
    for variable in variables:
      if not isinstance(variable, jax.extend.core.Literal):
        uses[variable] = uses.get(variable, 0) + 1
  return uses


def _last_uses(
  jaxpr: Any,
  uses: dict[Any, int],
  holders: dict[Any, frozenset[Any]],
  size: Size,
) -> dict[int, list[Any]]:
  """Index of an operation -> arrays in memory that no later one reads.

  Args:
    jaxpr: the program.
    uses: from `_uses`.
    holders: filled in here.
    size: bytes that an abstract array takes.
  """
  last: dict[Any, int] = {}
  for index, eqn in enumerate(jaxpr.eqns):
    sources: frozenset[Any] = frozenset()
    for variable in eqn.invars:
      if not isinstance(variable, jax.extend.core.Literal):
        sources |= holders.get(variable, frozenset())
    for variable in sources:
      last[variable] = index
    for variable in eqn.outvars:
      fused = _is_fused(eqn, uses.get(variable, 0), size)
      holders[variable] = sources if fused else frozenset([variable])
      if not fused:
        last[variable] = index
  for variable in jaxpr.outvars:
    if not isinstance(variable, jax.extend.core.Literal):
      for held in holders.get(variable, ()):
        last[held] = len(jaxpr.eqns)
  result: dict[int, list[Any]] = {}
  for variable, index in last.items():
    result.setdefault(index, []).append(variable)
  return result


def _is_fused(eqn: Any, uses: int, size: Size) -> bool:
  name = eqn.primitive.name
  if name == "convert_element_type" and not size(eqn.invars[0].aval):
    return False  # of a parameter, which its devices put together
  if name in _FREE:
    return True
  if name in _MAKES_ARRAYS or name.startswith("reduce") or _programs(eqn):
    return False
  return uses <= 1


def _inside(eqn: Any, size: Size) -> float:
  """Bytes that an operation's own programs take beside its results."""
  programs = _programs(eqn)
  if not programs or eqn.primitive.name == "pallas_call":
    return 0.0
  inside = max(peak_bytes(inner, size) for inner in programs)
  if eqn.primitive.name == "scan":
    return inside
  # The results of the inner program are those of the operation.
  return max(0.0, inside - sum(size(v.aval) for v in eqn.outvars))


def _programs(eqn: Any) -> list[Any]:
  return list(jax.extend.core.jaxprs_in_params(eqn.params))
