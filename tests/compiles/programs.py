"""Compiles for devices that are not here, and reads compiled programs."""

import dataclasses
import math
import re
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from moh_jax.runtime.devices import absent_devices, missing_packages

# Instructions for which no device runs a program.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
  r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|"
  r"ragged-all-to-all|reduce-scatter)(-start)?\("
)
_CALLS = re.compile(
  r"(calls|to_apply|body|condition|branch_computations|called_computations|"
  r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CONSTANT = re.compile(r"= s(?:32|64)\[\]\S* constant\((\d+)\)")
# The compiler for TPUs puts the parts of one collective, a chain, into several
# computations.
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_MESH = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}"
)
_MESH_SIZE = re.compile(r"'([^']+)'=(\d+)")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]*)\}\}"
)


def compile_for(target: str, function: Callable, *shapes: Any) -> Any:
  """Compiles for one device.

  Args:
    target: see `absent_devices`.
    function: takes arrays.
    *shapes: pytrees of `jax.ShapeDtypeStruct`.

  Raises:
    unittest.SkipTest: the compiler for the device is not installed.
  """
  if missing := missing_packages(target):
    raise unittest.SkipTest(f"needs {', '.join(missing)}")
  mesh = jax.sharding.Mesh(absent_devices(target)[:1], ("data",))
  whole = jax.NamedSharding(mesh, jax.P())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
  )
  with jax.set_mesh(mesh):
    return jax.jit(function).lower(*shapes).compile()


def programs(compiled: Any) -> list[tuple[str, list[tuple[int, ...]]]]:
  """What the device runs one after another.

  Args:
    compiled: from `compile_for`.

  Returns:
    For each program its line of the compiled text, and its outputs' shapes.
  """
  text = compiled.as_text()
  found = []
  for line in text[text.index("\nENTRY") :].splitlines():
    match = _INSTRUCTION.match(line)
    if match and match[2] not in _FREE:
      found.append((line, [tuple(s) for _, s in arrays(match[1])]))
  return found


def arrays(text: str) -> list[tuple[str, list[int]]]:
  """Dtype and shape of the arrays that a text of a program names."""
  return [(dtype, ints(shape)) for dtype, shape in _ARRAY.findall(text)]


def ints(text: str) -> list[int]:
  """The numbers of "2,4"."""
  return [int(number) for number in text.split(",") if number]


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a program.

  Attributes:
    kind: "all-gather", "all-reduce" and so on.
    dtype: of the elements, or several dtypes joined by "+".
    axes: mesh axes along which devices exchange something.
    count: how often it runs in a step.
    bytes: in a step, of the whole array, which is the result of an all-gather
      and the operand of a reduce-scatter on one device.
  """

  kind: str
  dtype: str
  axes: tuple[str, ...]
  count: int
  bytes: float


def read_collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
  """Reads the collectives of a compiled program.

  Args:
    text: of the program (HLO).
    mesh: sizes of the mesh's axes, in order; the program's devices are numbered
      along them.
  """
  bodies = computations(text)
  runs, seen, found = count_runs(bodies), set(), []
  for name, lines in bodies.items():
    for line in lines if runs[name] else ():
      match, chain = _COLLECTIVE.search(line), _CHAIN.search(line)
      if not match or (chain and chain.groups() in seen):
        continue
      seen.add(chain and chain.groups())
      groups = _groups(line, math.prod(mesh.values()))
      places = np.unravel_index(groups, tuple(mesh.values()))
      axes = tuple(a for a, x in zip(mesh, places) if (x != x[:, :1]).any())
      kind, is_start, parts = match[2], bool(match[3]), arrays(match[1])
      if kind == "collective-permute" and is_start:
        parts = parts[:1]  # the others are its result and its flags
      size = sum(_bytes(*part) for part in parts)
      number = groups.shape[1]
      if kind in ("all-gather", "reduce-scatter") and is_start:
        size *= number / (number + 1)  # both operands and results
      elif kind == "reduce-scatter":
        size *= number
      if axes:
        dtype = "+".join(sorted({dtype for dtype, _ in parts}))
        times = runs[name]
        found.append(Collective(kind, dtype, axes, times, times * size))
  return found


def computations(text: str) -> dict[str, list[str]]:
  """The lines of a program's computations by name, callees first."""
  found: dict[str, list[str]] = {}
  name = ""
  for line in text.splitlines():
    header = None if line.startswith(" ") else _HEADER.match(line)
    if header:
      name = header[2]
      found[name] = [line]
    # Other lines begin with a brace too: those of a kernel's own attributes.
    elif line == "}" or line.startswith("}, execution_thread"):
      name = ""
    elif name:
      found[name].append(line)
  return found


def count_runs(bodies: dict[str, list[str]]) -> dict[str, int]:
  """How often each computation runs in a call of the program."""
  runs = dict.fromkeys(bodies, 0)
  for name, lines in reversed(bodies.items()):
    if lines[0].startswith("ENTRY"):
      runs[name] = 1
    for line in lines[1:]:
      calls = _CALLS.findall(line)
      condition = bodies.get(dict(calls).get("condition", "").lstrip("%"), ())
      for kind, called in calls:
        known = _TRIPS.search(line)
        trips = [known[1]] if known else []
        trips = trips or [n for x in condition for n in _CONSTANT.findall(x)]
        times = max(map(int, trips), default=1) if kind == "body" else 1
        for one in called.strip("{}").split(","):
          if (one := one.strip().removeprefix("%")) in runs:
            runs[one] += times * runs[name]
  return runs


def _groups(line: str, size: int) -> np.ndarray:
  """Numbers of the devices that exchange data, [groups, devices of each]."""
  if match := _MESH.search(line):
    sizes = {name: int(n) for name, n in _MESH_SIZE.findall(match[1])}
    parts = {name: part for name, *part in _MESH_AXIS.findall(match[3])}
    # Every axis as what comes before the part that is crossed, this part, and
    # what comes after it.
    shape = []
    for name, length in sizes.items():
      before, part = parts.get(name, (length, 1))
      before, part = int(before or 1), int(part or length)
      shape += [before, part, length // (before * part)]
    order = match[2] or f"[{math.prod(shape)}]"
    crossed = range(1, len(shape), 3)
    numbers = np.moveaxis(
      _iota(order).reshape(shape), crossed, range(-len(sizes), 0)
    )
    return numbers.reshape(-1, math.prod(shape[dim] for dim in crossed))
  if match := _IOTA.search(line):
    return _iota(match[2]).reshape(ints(match[1]))
  if match := _LISTED.search(line):
    return np.array([ints(group) for group in match[1].split("},{")])
  assert "_groups=" not in line or "_groups={}" in line, line
  return np.arange(size)[None]


def _iota(text: str) -> np.ndarray:
  """Numbers from 0 in the order of a transposition, "[2,4]T(1,0)"."""
  dims, order = _ORDER.fullmatch(text).groups()
  numbers = np.arange(math.prod(ints(dims))).reshape(ints(dims))
  return numbers.transpose(ints(order)) if order else numbers


def _bytes(dtype: str, shape: list[int]) -> float:
  bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
  return math.prod(shape) * bits / 8
