"""Train steps, compiled for devices that are not here; their collectives.

Compilers run in a process of their own: they end the process on some errors,
and read variables of the environment when JAX starts. What devices exchange is
read from the text of the compiled program.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import math
import multiprocessing
import pickle
import re
import time
from collections.abc import Collection, Mapping

import numpy as np

from moh_jax.config import Config
from moh_jax.config.registry import ROUTERS, RouterKind, get_router
from moh_jax.runtime import devices as devices_lib
from moh_jax.runtime import sharding
from moh_jax.runtime.devices import USABLE, Topology
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}
_FULL = "RESOURCE_EXHAUSTED"
_SIZE = r"([\d.]+)([KMGT]?)"
# How libtpu says that a program does not fit.
_REFUSALS = (
  re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
  re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
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
_SENT = re.compile(
  r"= \((\w+)\[([\d,]*)\].* send\(.*_xla_megascale_transfer_type=\"(\w+)"
)
_CALLS = re.compile(
  r"(calls|to_apply|body|condition|branch_computations|called_computations|"
  r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_CONSTANT = re.compile(r"= s(?:32|64)\[\]\S* constant\((\d+)\)")
_MESH_GROUPS = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}"
)
_MESH_SIZE = re.compile(r"'([^']+)'=(\d+)")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_IOTA_GROUPS = re.compile(
  r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)"
)
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(
  r"(?:replica_groups|source_target_pairs)=\{\{([\d,{}]*)\}\}"
)


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


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of a train step, for each device.

  Attributes:
    compiler: its name and version.
    seconds: that it took.
    fits: whether the step fits.
    limit: bytes that it may have.
    total: bytes that it needs.
    arguments: bytes of the state and the batch; None where the compiler gave
      up, as for the next.
    temporaries: bytes of all else.
    collectives: of a step.
  """

  compiler: str
  seconds: float
  fits: bool
  limit: float
  total: float
  arguments: int | None = None
  temporaries: int | None = None
  collectives: tuple[Collective, ...] = ()


def compile_step(config: Config, topology: Topology) -> Compiled:
  """Compiles the train step of a run for a topology.

  Args:
    config: of the run.
    topology: the devices.

  Raises:
    ValueError: the compiler is missing, or fails; one line.
  """
  on_gpu = topology.chip.platform == "gpu"
  environment = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0" if on_gpu else "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
  spawn = multiprocessing.get_context("spawn")
  with (
    devices_lib.environment(environment),
    concurrent.futures.ProcessPoolExecutor(1, spawn) as pool,
  ):
    try:
      router = get_router(config.model.router.kind)
      return pool.submit(_compile, config, router, topology).result()
    except pickle.PicklingError as error:
      raise ValueError(
        f"the family or the router must be in a module that can be imported: "
        f"{error}"
      ) from None
    except concurrent.futures.process.BrokenProcessPool:
      raise ValueError(
        f"the compiler for {topology.name} ended its process; it may lack "
        "memory"
      ) from None


def _compile(config: Config, router: RouterKind, wanted: Topology) -> Compiled:
  """`compile_step` in a process of its own, which knows no routers but ours."""
  ROUTERS.add(router)
  platform = wanted.chip.platform
  limit = USABLE * wanted.chip.memory
  devices = devices_lib.absent_devices(wanted.name, wanted.slices)
  package = _COMPILERS[platform]
  compiler = f"{package} {importlib.metadata.version(package)}"
  start = time.perf_counter()
  try:
    mesh = sharding.make_mesh(config.mesh, devices)
    objective = task_builder(config).make_objective(config)
    program = make_program(config, objective, mesh)
    with sharding.use_mesh(mesh):
      inputs = program.state, program.batch, program.frozen
      compiled = program.step.lower(*inputs).compile()
  except (RuntimeError, TypeError) as error:  # of JAX and of XLA
    text = " ".join(str(error).split())
    if (sizes := refused_sizes(text)) is None:
      raise ValueError(f"{compiler}: {text[:300]}") from None
    needed, allowed = sizes
    seconds = time.perf_counter() - start
    return Compiled(compiler, seconds, False, allowed, needed)
  seconds = time.perf_counter() - start
  found = compiled.memory_analysis()
  outputs = found.output_size_in_bytes - found.alias_size_in_bytes
  # The program of several TPU slices is that of one of them.
  slices = wanted.slices if platform == "tpu" else 1
  total = found.argument_size_in_bytes + outputs + found.temp_size_in_bytes
  return Compiled(
    compiler=compiler,
    seconds=seconds,
    fits=total <= limit,
    limit=limit,
    total=total,
    arguments=found.argument_size_in_bytes,
    temporaries=found.temp_size_in_bytes,
    collectives=read_collectives(compiled.as_text(), dict(mesh.shape), slices),
  )


def refused_sizes(error: str) -> tuple[float, float] | None:
  """Bytes that a refused program needs and may have, as its compiler says.

  Args:
    error: of the compiler.

  Returns:
    None where the error is another.
  """
  found = [pattern.search(error) for pattern in _REFUSALS]
  match = next((one for one in found if one), None)
  if _FULL not in error or match is None:
    return None
  needed, allowed = (float(match[i]) * _UNITS[match[i + 1]] for i in (1, 3))
  return needed, allowed


def read_collectives(
  text: str, mesh: Mapping[str, int], slices: int = 1
) -> tuple[Collective, ...]:
  """Reads the collectives of a compiled program.

  Loops count as often as they run, where the program says how often that is.

  Args:
    text: of the program (HLO).
    mesh: sizes of the mesh's axes, in order; the program's devices are numbered
      along them.
    slices: of TPUs, which lie one after another along the first axis. Their
      program is that of one slice, which sends what crosses to its hosts.

  Returns:
    The collectives, those of one kind, dtype and group of devices together,
    the largest first.
  """
  bodies = computations(text)
  runs = count_runs(bodies)
  first, *rest = mesh
  mesh = {first: mesh[first] // slices, **{axis: mesh[axis] for axis in rest}}
  size_of_slice = math.prod(mesh.values())
  total: dict[tuple, list[float]] = {}
  seen = set()
  for name, lines in bodies.items():
    for line in lines if runs[name] else ():
      kind, size = None, 0.0
      if sent := _SENT.search(line):
        dtype, shape, kind = sent.groups()
        kind, axes = kind.lower().replace("_", "-"), (first,)
        size = _bytes(dtype, shape) * (slices if kind == "all-gather" else 1)
        devices = tuple(range(0, slices * size_of_slice, size_of_slice))
      elif match := _COLLECTIVE.search(line):
        # The compiler for TPUs puts the parts of one collective, a chain, into
        # several computations. A channel alone is not one collective: all that
        # stand under shard_map are of channel 1.
        chain = _CHAIN.search(line)
        if chain and chain.groups() in seen:
          continue
        seen.add(chain and chain.groups())
        groups = _groups(line, size_of_slice)
        axes, devices = _axes(groups, mesh), tuple(groups[0].tolist())
        kind, is_start = match[2], bool(match[3])
        arrays = _ARRAY.findall(match[1])
        if kind == "collective-permute":
          devices = devices_along(axes, mesh)  # pairs form a ring
          if is_start:
            arrays = arrays[:1]  # the others are its result and its flags
        dtype = "+".join(sorted({array[0] for array in arrays}))
        size = sum(_bytes(*array) for array in arrays)
        number = groups.shape[1]
        if kind in ("all-gather", "reduce-scatter") and is_start:
          # What is started has the operands and the results as its result.
          size *= number / (number + 1)
        elif kind == "reduce-scatter":
          size *= number
      if kind and axes:
        entry = total.setdefault((kind, dtype, axes, devices), [0, 0.0])
        entry[0] += runs[name]
        entry[1] += runs[name] * size
  found = [Collective(*key, *entry) for key, entry in total.items()]
  return tuple(sorted(found, key=lambda one: -one.bytes))


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
  """How often each computation runs in a call of the program.

  Args:
    bodies: of the program, see `computations`.
  """
  runs = dict.fromkeys(bodies, 0)
  for name, lines in reversed(bodies.items()):
    if lines[0].startswith("ENTRY"):
      runs[name] = 1
    for line in lines[1:]:
      for kind, called in _CALLS.findall(line):
        times = runs[name]
        if kind == "body":
          times *= _trips(line, bodies)
        for one in called.strip("{}").split(","):
          if (one := one.strip().removeprefix("%")) in runs:
            runs[one] += times
  return runs


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
  """How often a loop runs; 1 where the program does not say."""
  if known := _TRIPS.search(line):
    return int(known[1])
  called = dict(_CALLS.findall(line))
  condition = bodies.get(called.get("condition", "").lstrip("%"), [])
  bounds = [int(n) for one in condition for n in _CONSTANT.findall(one)]
  return max(bounds, default=1)


def _groups(line: str, size: int) -> np.ndarray:
  """Numbers of the devices that exchange data, [groups, devices of each]."""
  if match := _MESH_GROUPS.search(line):
    sizes = {name: int(n) for name, n in _MESH_SIZE.findall(match[1])}
    parts = {name: part for name, *part in _AXIS.findall(match[3])}
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
  if match := _IOTA_GROUPS.search(line):
    return _iota(match[2]).reshape(_ints(match[1]))
  if match := _LISTED_GROUPS.search(line):
    return np.array([_ints(group) for group in match[1].split("},{")])
  return np.arange(size)[None]


def _iota(text: str) -> np.ndarray:
  """Numbers from 0 in the order of a transposition, "[2,4]T(1,0)"."""
  dims, order = _ORDER.fullmatch(text).groups()
  numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
  return numbers.transpose(_ints(order)) if order else numbers


def _ints(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes along which the devices of a group differ."""
  places = np.unravel_index(groups, tuple(mesh.values()))
  return tuple(
    axis for axis, place in zip(mesh, places) if (place != place[:, :1]).any()
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
