"""The plan of a run: whether it fits a topology, how it is split, its time."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import logical_axis_rules
from jax.sharding import AbstractMesh, AxisType

from moh_jax.config import Config, MeshConfig, without_router
from moh_jax.config.base import choices
from moh_jax.data.infer import resolve_without_data
from moh_jax.layers.stack import RUN_TWICE
from moh_jax.models.adapters import count, join
from moh_jax.ops.target import Target
from moh_jax.runtime import devices, sharding
from moh_jax.runtime.devices import USABLE, Topology
from moh_jax.runtime.sharding import (
  RULES,
  axes_of_entry,
  bytes_on_device,
  is_box,
)
from moh_jax.training.compiling import (
  Collective,
  Compiled,
  compile_step,
  devices_along,
)
from moh_jax.training.entrance import check_run
from moh_jax.training.exchange import exchange_axes
from moh_jax.training.flops import (
  LayerForm,
  published_peak,
  step_flops,
  step_forms,
)
from moh_jax.training.step import Objective, Program, make_program
from moh_jax.training.task import task_builder

# What programs reach of published figures. These three are assumptions.
PEAK_SHARE = 0.5
MEMORY_SHARE = 0.8
LINK_SHARE = 0.7
# What a compiled step needs beside state and gradients, over the arrays that
# its backward pass reads: 1.5 to 3.1 in the runs of docs/plan.md.
_TEMPORARIES = 3.5


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a run's state on one device, exact by shapes and shardings.

  Attributes:
    parameters: that are trained.
    frozen: parameters that are not.
    optimizer: moments and counters.
    ema: averaged parameters.
    batch: of a step.
    host: moments that are in the memory of the device's host between steps
      (`optim.state_memory`). In a step the device has them too: the compiler
      for TPUs fetches all of them before it frees the activations.
  """

  parameters: int
  frozen: int
  optimizer: int
  ema: int
  batch: int
  host: int

  @property
  def arguments(self) -> int:
    """Bytes of the train step's arguments: the state and the batch."""
    return self.total - self.host

  @property
  def total(self) -> int:
    """All bytes together: the least that a step needs."""
    return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Layout:
  """How parameters of one shape are split over the mesh.

  Attributes:
    name: path of the parameter; "*" stands for the numbers of those that are
      alike.
    number: of parameters.
    shape: of each.
    dtype: of each.
    axes: for each dimension the mesh axes that split it, "" for none.
    bytes: of all of them on one device.
  """

  name: str
  number: int
  shape: tuple[int, ...]
  dtype: str
  axes: tuple[str, ...]
  bytes: int


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Seconds of a step.

  Attributes:
    products: of matrix products.
    update: of reading and writing the state in the optimizer's update.
    communication: of all collectives.
  """

  products: float
  update: float
  communication: float

  @property
  def seconds(self) -> float:
    """The prediction: communication is hidden behind products."""
    return max(self.products, self.communication) + self.update

  @property
  def slowest(self) -> float:
    """The time if no communication is hidden."""
    return self.products + self.communication + self.update


@dataclasses.dataclass(frozen=True)
class Exchange:
  """What a value of `mesh.gather` costs, by the parameters' sizes.

  Attributes:
    gather: the value.
    memory: bytes of gradients and gathered parameters on a device, but for
      those of one layer at a time.
    bytes: of gathered parameters and exchanged gradients in a step.
    seconds: that these take.
  """

  gather: str
  memory: float
  bytes: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a run needs on a topology.

  Attributes:
    config: of the run; nothing is unset.
    topology: the devices.
    assumed: fields of the model that missing data would tell, with the values
      that stand for them.
    mesh: sizes of the mesh's axes.
    parameters: their number.
    layouts: how they are split.
    memory: of a device.
    gradients: bytes of gradients and gathered parameters on a device.
    kept: bytes of a microbatch that the backward pass reads, on a device; with
      `mesh.tensor` some of them are split.
    attention: forms of attention, for each group of equal layers.
    flops: of a step, for the active heads.
    baseline_flops: of a step of the same model without its router.
    computed_flops: that a step computes, see `StepFlops.computed`.
    recomputed_flops: that `model.remat` computes again, beside these.
    exchanges: what the values of `mesh.gather` cost, the run's first; empty
      where no devices share the batch.
    step_time: with the collectives of the compiled program; without one nothing
      is known of them.
    unit: what throughput counts, "images" or "tokens".
    units_per_step: number of them.
    compiled: what the compiler says, or None.
    not_compiled: why it was not compiled, or "".
  """

  config: Config
  topology: Topology
  assumed: dict[str, object]
  mesh: dict[str, int]
  parameters: int
  layouts: tuple[Layout, ...]
  memory: Memory
  gradients: float
  kept: float
  attention: tuple[LayerForm, ...]
  flops: float
  baseline_flops: float
  computed_flops: float
  recomputed_flops: float
  exchanges: tuple[Exchange, ...]
  step_time: StepTime
  unit: str
  units_per_step: int
  compiled: Compiled | None
  not_compiled: str

  @property
  def fits(self) -> bool:
    """Whether the run fits by its compiler; without one, whether it should."""
    if self.compiled:
      return self.compiled.fits
    return self.bounds[1] <= self.limit

  @property
  def limit(self) -> float:
    """Bytes of a device that a step may have."""
    usable = USABLE * self.topology.chip.memory
    return self.compiled.limit if self.compiled else usable

  @property
  def bounds(self) -> tuple[float, float]:
    """The least bytes that a step needs, and about the most."""
    fixed, kept = self.memory.total + self.gradients, self.kept
    in_host = self.config.model.remat == "offload"
    least = 0 if in_host else kept / self.mesh.get("tensor", 1)
    return fixed + least, fixed + _TEMPORARIES * kept

  def microbatches(self) -> tuple[int, float] | None:
    """The fewest microbatches that should fit, and about the bytes they need.

    What is neither the state nor gradients and gathered parameters grows with
    the microbatch. None where the run has them, or no number fits.
    """
    config, found = self.config, self.compiled
    parts, batch = config.optim.accumulation, config.data.batch_size
    shards = math.prod(self.mesh[axis] for axis in sharding.BATCH_AXES)
    total = found.total if found else self.bounds[1]
    grows = max(total - self.memory.total - self.gradients, 0)
    # Several microbatches have the gradients of one beside their sum.
    whole = self.mesh["fsdp"] if config.mesh.gather == "step" else 1
    beside = whole * self.memory.parameters
    for number in range(1, batch // shards + 1):
      needs = total + grows * (parts / number - 1)
      needs += beside * ((number > 1) - (parts > 1))
      if batch % (shards * number) == 0 and needs <= self.limit:
        return None if number == parts else (number, needs)
    return None


def make_plan(config: Config, topology: Topology, compiles: bool) -> Plan:
  """Plans a run; no data and no device are needed.

  Args:
    config: of the run.
    topology: the devices of one of its slices (`mesh.dcn_data`).
    compiles: compile the train step, where the compiler is installed.

  Raises:
    ValueError: the mesh does not fit the devices, the batch or the heads.
  """
  config, assumed = resolve_without_data(config)
  topology = dataclasses.replace(topology, slices=config.mesh.dcn_data)
  chip = topology.chip
  sizes = sharding.axis_sizes(config.mesh, topology.devices)
  mesh = AbstractMesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    abstract_device=devices.abstract_device(topology),
  )
  objective = task_builder(config).make_objective(config)
  program = make_program(config, objective, mesh)
  check_run(config, mesh, program)
  state, sizes = program.state, dict(mesh.shape)
  params = join(program.frozen, state.params)
  counters = bytes_on_device((state.step, state.rng))
  memory = Memory(
    parameters=bytes_on_device(state.params),
    frozen=bytes_on_device(program.frozen),
    optimizer=bytes_on_device(state.opt_state) + counters,
    ema=bytes_on_device(state.ema),
    batch=bytes_on_device(program.batch),
    host=bytes_on_device(state.opt_state, in_host=True),
  )
  device = Target(chip.platform, chip.kind, chip.cores)
  forms = step_forms(config, sizes, device)
  flops = step_flops(config)
  baseline = without_router(config.model).in_run(config)
  computed = flops.computed(forms)
  exchanges: tuple[Exchange, ...] = ()
  if objective.by_device:
    exchanges = _exchanges(config, program, sizes, topology)
  gradients = memory.parameters * (2 if config.optim.accumulation > 1 else 1)
  again = RUN_TWICE.get(config.model.remat, ())
  once = {"products": flops.in_remat, "attention": computed["attention"] / 3}
  recomputed = sum(once[part] for part in again)
  compiled, reason = None, "not asked for"
  if compiles:
    compiled, reason = _compile(config, topology)
  collectives = compiled.collectives if compiled else ()
  return Plan(
    config=config,
    topology=topology,
    assumed=assumed,
    mesh=sizes,
    parameters=count(params),
    layouts=_layouts(params),
    memory=memory,
    gradients=exchanges[0].memory if exchanges else gradients,
    kept=_kept(config, objective, program, mesh),
    attention=forms,
    flops=flops.active,
    baseline_flops=step_flops(baseline).active,
    computed_flops=sum(computed.values()),
    recomputed_flops=recomputed,
    exchanges=exchanges,
    step_time=StepTime(
      products=(sum(computed.values()) + recomputed)
      / (topology.devices * published_peak(chip.kind) * PEAK_SHARE),
      # The state is read and written once, and the gradients read.
      update=(
        2 * (memory.total - memory.batch - memory.frozen) + memory.parameters
      )
      / (chip.memory_speed * MEMORY_SHARE),
      communication=sum(seconds(one, topology) for one in collectives),
    ),
    unit=objective.unit,
    units_per_step=objective.units_per_step,
    compiled=compiled,
    not_compiled=reason,
  )


def _kept(
  config: Config, objective: Objective, program: Program, mesh: AbstractMesh
) -> float:
  """Bytes that the backward pass reads of the microbatch of a device."""
  alone = mesh.update(axis_sizes=(1,) * len(mesh.shape))
  shards = math.prod(mesh.shape[axis] for axis in sharding.BATCH_AXES)
  examples = config.data.batch_size // config.optim.accumulation // shards
  if config.model.attention_impl == "cudnn":
    # Its library may be missing here; other forms keep as much.
    model = dataclasses.replace(config.model, attention_impl="auto")
    config = dataclasses.replace(config, model=model)
    objective = task_builder(config).make_objective(config)
  plain = functools.partial(
    jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  )

  def residuals(params: Any, frozen: Any, batch: Any) -> Any:
    rng = jax.random.key(0)

    def loss(params: Any) -> Any:
      return objective.loss_fn(join(frozen, params), batch, rng, jnp.int32(0))

    return jax.vjp(loss, params, has_aux=True)[1]

  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((examples, *x.shape), x.dtype),
    objective.example,
  )
  params, frozen = plain(program.state.params), plain(program.frozen)
  with jax.sharding.use_abstract_mesh(alone), logical_axis_rules(RULES):
    found = jax.eval_shape(residuals, params, frozen, batch)
  # Parameters are counted with the state.
  own = {x.shape for x in jax.tree.leaves((params, frozen))}
  kept = (x for x in jax.tree.leaves(found) if x.shape not in own)
  return sum(x.size * x.dtype.itemsize for x in kept) / mesh.shape["sequence"]


def _exchanges(
  config: Config, program: Program, sizes: dict[str, int], topology: Topology
) -> tuple[Exchange, ...]:
  """What the values of `mesh.gather` cost; without `fsdp` they are one."""
  values = choices(MeshConfig, "gather") if sizes["fsdp"] > 1 else ()
  ours = config.mesh.gather
  if not exchange_axes(dataclasses.replace(config.mesh, gather="step"), sizes):
    return ()
  sent = jnp.dtype(config.mesh.exchange).itemsize / 4
  parts, found = config.optim.accumulation, []
  # Of the trained parameters, split by fsdp or not; tables of the vocabulary,
  # which only "step" gathers. Frozen ones are gathered alone.
  split = rounded = tables = own = 0.0

  def axes_that_split(leaf: Any) -> set[str]:
    spec = leaf.sharding.spec
    return {axis for entry in spec for axis in axes_of_entry(entry)}

  held = jax.tree.leaves(program.frozen)
  frozen = sizes["fsdp"] * bytes_on_device(
    [leaf for leaf in held if "fsdp" in axes_that_split(leaf)]
  )
  for box, leaf in zip(
    jax.tree.leaves(program.boxed, is_leaf=is_box),
    jax.tree.leaves(program.state.params),
  ):
    size = bytes_on_device([leaf])
    own += size
    if "fsdp" in axes_that_split(leaf):
      split += size * sizes["fsdp"]
      dtype = jnp.dtype(getattr(box, "dtype", None) or leaf.dtype)
      whole = size * sizes["fsdp"] * dtype.itemsize / 4
      rounded += whole
      tables += whole * ("vocab" in getattr(box, "names", ()))
  shared = own - split / sizes["fsdp"]

  def cost(kind: str, axis: str, size: float) -> tuple[float, float]:
    devices = devices_along([axis], sizes)
    one = Collective(kind, "", (axis,), devices, 1, size)
    return (size, seconds(one, topology)) if len(devices) > 1 else (0.0, 0.0)

  for gather in dict.fromkeys((ours, *values)):
    if gather == "step":
      memory = split + (2 if parts > 1 else 1) * rounded + shared + frozen
      costs = [
        cost("all-gather", "fsdp", rounded + frozen),
        cost("reduce-scatter", "fsdp", sent * split),
        cost("all-reduce", "fsdp", sent * shared),
      ]
    else:
      memory = own * (2 if parts > 1 else 1)
      # In the forward pass and again in the backward pass.
      costs = [
        cost("all-gather", "fsdp", 2 * parts * (rounded - tables + frozen)),
        cost("reduce-scatter", "fsdp", parts * (rounded - tables)),
        cost("all-reduce", "fsdp", parts * shared),
      ]
    costs.append(cost("all-reduce", "data", sent * own))
    found.append(Exchange(gather, memory, *map(sum, zip(*costs))))
  return tuple(found)


def _compile(config: Config, topology: Topology) -> tuple[Compiled | None, str]:
  """Compiles a run if that can be done, or says why not."""
  if missing := devices.missing_packages(topology.name):
    return None, f"needs the package {', '.join(missing)} in the version of jax"
  try:
    return compile_step(config, topology), ""
  except ValueError as error:
    return None, str(error)


def _layouts(params: Any) -> tuple[Layout, ...]:
  """The sharding of every parameter, those that are alike in one row."""
  groups: dict[tuple, list[tuple[str, Any]]] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    spec = leaf.sharding.spec
    axes = tuple(
      "" if axis is None else axis if isinstance(axis, str) else "+".join(axis)
      for axis in (*spec, *[None] * (leaf.ndim - len(spec)))
    )
    key = re.sub(r"\d+", "*", name), leaf.shape, str(leaf.dtype), axes
    groups.setdefault(key, []).append((name, leaf))
  rows = []
  for (pattern, *key), leaves in groups.items():
    name = pattern if len(leaves) > 1 else leaves[0][0]
    size = bytes_on_device([leaf for _, leaf in leaves])
    rows.append(Layout(name, len(leaves), *key, size))
  return tuple(rows)


def seconds(collective: Collective, topology: Topology) -> float:
  """Seconds that a device sends for a collective.

  Of n devices each sends (n - 1) / n of the array, in an all-reduce twice that.
  What crosses hosts, or the slices of TPUs, goes through the adapters of the
  group's devices.
  """
  chip = topology.chip
  group = len(collective.devices)
  joined = topology.devices // topology.slices  # by links
  if chip.platform == "gpu":
    joined = min(joined, chip.per_host)
  # A mesh has its slices, and the hosts of GPUs, one after another.
  crossing = len({device // joined for device in collective.devices})
  inside = group // crossing
  size = collective.bytes * (2 if collective.kind == "all-reduce" else 1)
  if collective.kind == "collective-permute":
    speed = chip.network if crossing > 1 else chip.link
    return size / (speed * LINK_SHARE)
  # Along a ring of hosts or slices each sends its part of the array on.
  time = size * (inside - 1) / inside / chip.link
  time += size * (crossing - 1) / crossing / (inside * chip.network)
  return time / LINK_SHARE


def assumptions(plan: Plan) -> Sequence[str]:
  """What a predicted time takes for granted, a sentence each."""
  config, topology = plan.config, plan.topology
  chip, network, more = topology.chip, "", ()
  peak = published_peak(chip.kind)
  if chip.platform == "gpu" or topology.slices > 1:
    others = "hosts" if chip.platform == "gpu" else "slices"
    network = f", {chip.network / 1e9:g} GB/s to other {others}"
  collectives = ("collectives are not counted without a compiled program",)
  if plan.compiled and plan.compiled.fits:
    collectives = (
      f"collectives reach {LINK_SHARE:.0%} of {chip.link / 1e9:g} GB/s per "
      f"device{network} (the share is assumed)",
      "communication is hidden behind products as far as these take longer",
    )
  if config.optim.state_memory == "host" or config.model.remat == "offload":
    more = ("copies to and from the memory of the host take no time",)
  return (
    f"products reach {PEAK_SHARE:.0%} of {peak / 1e12:g} TFLOP/s "
    "(published for bfloat16; the share is assumed)",
    f"the update reaches {MEMORY_SHARE:.0%} of {chip.memory_speed / 1e9:g} GB/s"
    " of memory (the share is assumed)",
    *collectives,
    "input, evaluation, checkpoints and starting a step take no time",
    *more,
    f"source of the device's figures: {chip.source}",
  )
