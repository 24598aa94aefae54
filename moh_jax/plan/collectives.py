"""The collectives of a compiled program, read from its text."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np

_KINDS = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_CALLS = re.compile(
  r"(calls|to_apply|body|condition|branch_computations|called_computations|"
  r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CONSTANT = re.compile(r"= s(?:32|64)\[\]\S* constant\((\d+)\)")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA_GROUPS = re.compile(
  r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_LISTED_GROUPS = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives of a program that are alike.

  Attributes:
    kind: "all-gather", "all-reduce" and so on.
    dtype: of the elements, or several dtypes joined by "+".
    axes: mesh axes along which devices exchange something.
    devices: positions in the mesh of the devices of one group.
    count: how often it runs in a step.
    bytes: of all of them in a step: of the whole array, which is the result of
      an all-gather and the operand of a reduce-scatter on one device.
  """

  kind: str
  dtype: str
  axes: tuple[str, ...]
  devices: tuple[int, ...]
  count: int
  bytes: float


def read_collectives(
  text: str, mesh: Mapping[str, int]
) -> tuple[Collective, ...]:
  """Reads the collectives of a compiled program.

  Loops count as often as they run, where the program says how often that is.

  Args:
    text: of the program (HLO).
    mesh: sizes of the mesh's axes, in order; the program's devices are numbered
      along them.

  Returns:
    The collectives, those of one kind, dtype and group of devices together,
    the largest first.
  """
  computations = dict(_computations(text))
  runs = _runs(computations)
  total: dict[tuple, list[float]] = {}
  seen = set()
  for name, lines in computations.items():
    for line in lines:
      match = _COLLECTIVE.search(line)
      if not match or not runs.get(name):
        continue
      # A compiler for TPUs puts the parts of one collective into several
      # computations.
      channel = _CHANNEL.search(line)
      if channel and channel[1] in seen:
        continue
      seen.add(channel and channel[1])
      devices = _group(line, math.prod(mesh.values()))
      if len(devices) < 2:
        continue
      kind, started = match[2], bool(match[3])
      arrays = _ARRAY.findall(match[1])
      if kind == "collective-permute" and started:
        arrays = arrays[:1]  # the others are its result and its flags
      size = sum(_bytes(*array) for array in arrays)
      if kind in ("all-gather", "reduce-scatter"):
        # What is started has the operands and the results as its result.
        number = len(devices)
        if started:
          size *= number / (number + 1)
        elif kind == "reduce-scatter":
          size *= number
      dtype = "+".join(sorted({array[0] for array in arrays}))
      axes = _axes(devices, mesh)
      if kind == "collective-permute":  # pairs form a ring
        devices = devices_along(axes, mesh)
      key = (kind, dtype, axes, devices)
      entry = total.setdefault(key, [0, 0.0])
      entry[0] += runs[name]
      entry[1] += runs[name] * size
  found = [Collective(*key, *entry) for key, entry in total.items()]
  return tuple(sorted(found, key=lambda one: -one.bytes))


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
  """Names of a program's computations and their lines, callees first."""
  name, lines = "", []
  for line in text.splitlines():
    header = None if line.startswith(" ") else _HEADER.match(line)
    if header:
      name, lines = header[2], [line]
    elif line.startswith("}") and name:
      yield name, lines
      name = ""
    elif name:
      lines.append(line)


def _runs(computations: dict[str, list[str]]) -> dict[str, int]:
  """How often each computation runs in a call of the program."""
  runs = dict.fromkeys(computations, 0)
  for name in reversed(computations):
    lines = computations[name]
    if lines[0].startswith("ENTRY"):
      runs[name] = 1
    for line in lines[1:]:
      for kind, called in _CALLS.findall(line):
        times = runs[name]
        if kind == "body":
          times *= _trips(line, computations)
        for one in called.strip("{}").split(","):
          if (one := one.strip().removeprefix("%")) in runs:
            runs[one] += times
  return runs


def _trips(line: str, computations: dict[str, list[str]]) -> int:
  """How often a loop runs; 1 where the program does not say."""
  if known := _TRIPS.search(line):
    return int(known[1])
  called = dict(_CALLS.findall(line))
  condition = computations.get(called.get("condition", "").lstrip("%"), [])
  bounds = [int(n) for one in condition for n in _CONSTANT.findall(one)]
  return max(bounds, default=1)


def _group(line: str, size: int) -> tuple[int, ...]:
  """The devices of a collective's first group."""
  if match := _MESH_GROUPS.search(line):
    dims = [part.split("=") for part in match[1].split(",")]
    shape = [int(length) for _, length in dims]
    index: list = [0] * len(shape)
    names = [name.strip("'") for name, _ in dims]
    for name, before, part in _AXIS.findall(match[2]):
      position = names.index(name)
      every = np.arange(shape[position])
      if part:  # a part of an axis
        every = every.reshape(int(before), int(part), -1)[0, :, 0]
      index[position] = every
    ids = np.arange(math.prod(shape)).reshape(shape)
    lists = [np.atleast_1d(one) for one in index]
    return tuple(ids[np.ix_(*lists)].reshape(-1).tolist())
  if match := _IOTA_GROUPS.search(line):
    groups, shape = (
      [int(n) for n in part.split(",")] for part in match.groups()[:2]
    )
    ids = np.arange(math.prod(shape)).reshape(shape)
    if match[3]:
      ids = ids.transpose([int(n) for n in match[3].split(",")])
    return tuple(ids.reshape(groups[0], -1)[0].tolist())
  if match := _LISTED_GROUPS.search(line):
    return tuple(int(n) for n in match[1].split(",") if n)
  return tuple(range(size))


def _axes(devices: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes along which devices differ."""
  places = np.unravel_index(devices, tuple(mesh.values()))
  return tuple(
    axis for axis, place in zip(mesh, places) if len(set(place.tolist())) > 1
  )


def devices_along(
  axes: Collection[str], mesh: Mapping[str, int]
) -> tuple[int, ...]:
  """Positions in a mesh of the devices that differ only along some axes.

  Args:
    axes: the axes; along the others the devices are the first.
    mesh: sizes of the mesh's axes, in order.
  """
  ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
  place = tuple(slice(None) if axis in axes else 0 for axis in mesh)
  return tuple(ids[place].reshape(-1).tolist())


def _bytes(dtype: str, shape: str) -> float:
  count = math.prod(int(n) for n in shape.split(",") if n)
  if dtype == "pred":
    return count
  return count * int(re.findall(r"\d+", dtype)[0]) / 8
