"""Reads what devices exchange, and compute, from a compiled program."""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_CALL = re.compile(
  rf"= (\(?[^=]*?\)?) ({'|'.join(KINDS)})(?:-start)?\(.*?"
  r"(?:replica_groups|source_target_pairs)=(mesh\[.*? \{.*?\}|\S+)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(text: str, mesh: Mesh) -> set[tuple[str, str, str]]:
  """The exchanges of a program.

  Args:
    text: of the compiled program.
    mesh: its devices.

  Returns:
    (kind, mesh axes joined by "+", dtype) of each.
  """
  found = set()
  for result, kind, groups in _CALL.findall(text):
    axes = "+".join(_axes(_groups(groups), mesh))
    for dtype, _ in _ARRAY.findall(result):
      if axes:
        found.add((kind, axes, dtype))
  return found


def shapes(text: str, dtype: str = "f32") -> set[tuple[int, ...]]:
  """Shapes of a program's arrays of a dtype."""
  return {
    tuple(map(int, filter(None, dims.split(","))))
    for kind, dims in _ARRAY.findall(text)
    if kind == dtype
  }


def _groups(text: str) -> list[list[int]]:
  """Devices that exchange data, by their place in the mesh."""
  if text.startswith("mesh"):
    return _groups_of_axes(text)
  if text.startswith("{"):
    parts = re.findall(r"\{([\d,]+)\}", text)
    return [list(map(int, part.split(","))) for part in parts]
  shape, order = text.rstrip(",").split("<=")  # "[4,2]<=[2,2,2]T(1,0,2)"
  return _iota(order).reshape(_ints(shape[1:-1])).tolist()


def _groups_of_axes(text: str) -> list[list[int]]:
  """Groups along axes: "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"."""
  named, order, axes = re.match(
    r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*?)\}", text
  ).groups()
  sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named)}
  if ":" in axes:
    raise NotImplementedError(f"parts of axes: {text}")
  crossed = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", axes)]
  dims = list(sizes.values())
  numbers = _iota(order or f"[{math.prod(dims)}]").reshape(dims)
  numbers = np.moveaxis(numbers, crossed, range(-len(crossed), 0))
  return numbers.reshape(-1, math.prod(dims[dim] for dim in crossed)).tolist()


def _iota(text: str) -> np.ndarray:
  """Numbers from 0, in the order of a transposition: "[2,4]T(1,0)"."""
  dims, order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
  numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
  return numbers.transpose(_ints(order)) if order else numbers


def _ints(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> list[str]:
  """Mesh axes along which the devices of a group differ."""
  sizes = list(mesh.shape.values())
  crossed = set()
  for group in groups:
    for one, other in itertools.pairwise(group):
      places = (np.unravel_index(i, sizes) for i in (one, other))
      pairs = zip(mesh.axis_names, *places, strict=True)
      crossed |= {name for name, a, b in pairs if a != b}
  return [name for name in mesh.axis_names if name in crossed]


def dot_flops(text: str) -> int:
  """Multiplications and additions of a program's matrix products.

  The body of a loop counts as often as it runs, where the compiler knows it.

  Args:
    text: of the compiled program.
  """
  bodies, calls = _computations(text)
  counts: dict[str, int] = {}

  def count(name: str) -> int:
    if name not in counts:
      own = sum(map(_flops_of, bodies[name], itertools.repeat(bodies[name])))
      inner = sum(times * count(callee) for callee, times in calls[name])
      counts[name] = own + inner
    return counts[name]

  entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.M)[1]
  return count(entry)


def _computations(text: str) -> tuple[dict, dict]:
  """Lines of each computation, and the computations that it calls how often."""
  bodies: dict[str, list[str]] = {}
  calls: dict[str, list[tuple[str, int]]] = {}
  name = ""
  for line in text.splitlines():
    if match := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
      name = match[1]
      bodies[name], calls[name] = [], []
    elif name and line.startswith("  "):
      bodies[name].append(line)
      trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
      for key, callee in re.findall(
        r"(body|calls|to_apply|condition)=%?([\w.-]+)", line
      ):
        times = int(trips[1]) if trips and key == "body" else 1
        calls[name].append((callee, times))
      for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
        calls[name] += [(c.strip(" %"), 1) for c in group.split(",")]
  return bodies, calls


_DOT = re.compile(
  r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[([\d,]*)\]\S* )?%?([\w.-]+)"
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
  left_sizes = _ints(left) if left else []
  inner = [left_sizes[i] for i in (_ints(dims) if dims else [])]
  return 2 * math.prod(_ints(out) if out else []) * math.prod(inner)
