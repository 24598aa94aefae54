"""Reads what devices compute, and hold, from a compiled program."""

import math
import re

from moh_jax.training.compiling import computations, count_runs

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_DOT = re.compile(
  r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[([\d,]*)\]\S* )?%?([\w.-]+)"
)


def shapes(text: str, dtype: str = "f32") -> set[tuple[int, ...]]:
  """Shapes of a program's arrays of a dtype."""
  return {
    tuple(_ints(dims)) for kind, dims in _ARRAY.findall(text) if kind == dtype
  }


def dot_flops(text: str) -> int:
  """Multiplications and additions of a program's matrix products.

  The body of a loop counts as often as it runs, where the compiler knows it.

  Args:
    text: of the compiled program.
  """
  bodies = computations(text)
  runs = count_runs(bodies)
  return sum(
    runs[name] * _flops_of(line, lines)
    for name, lines in bodies.items()
    for line in lines
  )


def _flops_of(line: str, body: list[str]) -> int:
  """Of one instruction; 0 if it is no product."""
  match = _DOT.search(line)
  if not match:
    return 0
  out, left, operand = match.groups()
  if left is None:
    start = re.compile(
      rf"\s+(?:ROOT )?%?{re.escape(operand)} = \w+\[([\d,]*)\]"
    )
    left = next(m[1] for m in map(start.match, body) if m)
  dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1]
  inner = [_ints(left)[i] for i in _ints(dims)]
  return 2 * math.prod(_ints(out)) * math.prod(inner)


def _ints(text: str) -> list[int]:
  return [int(number) for number in text.split(",") if number]
