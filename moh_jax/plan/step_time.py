"""Predicts the time of a step from published figures, with assumptions."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.layers.stack import RUN_TWICE
from moh_jax.plan.collectives import Collective, devices_along
from moh_jax.plan.memory import Memory
from moh_jax.runtime.topology import Topology
from moh_jax.speed.peaks import published_peak

# What programs reach of published figures. These three are assumptions.
PEAK_SHARE = 0.5
MEMORY_SHARE = 0.8
LINK_SHARE = 0.7


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


def predict(
  config: Config,
  topology: Topology,
  flops: Mapping[str, float],
  memory: Memory,
  collectives: Sequence[Collective],
) -> StepTime:
  """Predicts the time of a step.

  Args:
    config: of the run.
    topology: the devices.
    flops: that a step computes, see `StepFlops.computed`.
    memory: of a device.
    collectives: of a step.
  """
  peak = published_peak(topology.chip.kind)
  if peak is None:
    raise ValueError(f"no published peak of {topology.chip.kind!r} is known")
  state = memory.parameters + memory.optimizer + memory.host + memory.ema
  return StepTime(
    products=(sum(flops.values()) + recomputed(config, flops))
    / (topology.devices * peak * PEAK_SHARE),
    # Read and written once, and the gradients read.
    update=(2 * state + memory.parameters)
    / (topology.chip.memory_speed * MEMORY_SHARE),
    communication=communication(collectives, topology),
  )


def recomputed(config: Config, flops: Mapping[str, float]) -> float:
  """FLOPs that `model.remat` computes again, beside those that are given."""
  return sum(flops[part] / 3 for part in RUN_TWICE.get(config.model.remat, ()))


def communication(
  collectives: Sequence[Collective], topology: Topology
) -> float:
  """Seconds that a device sends for all collectives of a step."""
  return sum(seconds(one, topology) for one in collectives)


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


def expected_collectives(
  config: Config, mesh: Mapping[str, int], parameters: int
) -> tuple[Collective, ...]:
  """The collectives that a step should have, before it is compiled.

  In each microbatch the devices of `fsdp` put the parameters together in the
  compute dtype for the forward and for the backward pass and add up the
  gradients; those of `data` and `sequence` add them up too; those of `tensor`
  add up the results of attention and of the MLP in each pass, and those of
  `sequence` exchange queries, keys, values and the results of attention.

  Args:
    config: of the run.
    mesh: sizes of the mesh's axes, in order.
    parameters: their number.
  """
  times, dtype = config.optim.accumulation, jnp.dtype(config.model.dtype)
  short = {"float32": "f32", "bfloat16": "bf16"}[config.model.dtype]
  size = parameters * dtype.itemsize / mesh["tensor"]
  found = []

  def add(kind: str, axis: str, count: int, each: float) -> None:
    if mesh[axis] > 1:
      group = devices_along((axis,), mesh)
      found.append(Collective(kind, short, (axis,), group, count, count * each))

  add("all-gather", "fsdp", 2 * times, size)
  add("reduce-scatter", "fsdp", times, size)
  for axis in ("data", "sequence"):
    add("all-reduce", axis, times, size / mesh["fsdp"])
  shards = mesh["data"] * mesh["fsdp"]
  examples = config.data.batch_size / (shards * times)
  again = "products" in RUN_TWICE.get(config.model.remat, ())
  passes = 3 if again else 2
  length = getattr(config.data, "sequence_length", None)
  for group in config.model.layer_groups():
    tokens = examples * (length or group.tokens) / mesh["sequence"]
    layers = passes * group.depth * times
    each = tokens * group.width * dtype.itemsize
    add("all-reduce", "tensor", 2 * layers, each)
    heads, dim = group.budget.num_heads, group.budget.head_dim
    both = heads + (group.kv_heads or heads)  # q and k, or v and the result
    each = tokens * both / 2 * dim * dtype.itemsize / mesh["tensor"]
    add("all-to-all", "sequence", 4 * layers, each)
  return tuple(found)


def assumptions(
  config: Config, topology: Topology, compiled: bool
) -> tuple[str, ...]:
  """What a prediction takes for granted, a sentence each."""
  chip = topology.chip
  peak = published_peak(chip.kind)
  network, copies = "", ()
  if chip.platform == "gpu" or topology.slices > 1:
    others = "hosts" if chip.platform == "gpu" else "slices"
    network = f", {chip.network / 1e9:g} GB/s to other {others}"
  if config.optim.state_memory == "host" or config.model.remat == "offload":
    copies = ("copies to and from the memory of the host take no time",)
  return (
    f"products reach {PEAK_SHARE:.0%} of {peak / 1e12:g} TFLOP/s (published "
    "for bfloat16; the share is assumed)",
    f"the update reaches {MEMORY_SHARE:.0%} of {chip.memory_speed / 1e9:g} GB/s"
    " of memory (the share is assumed)",
    f"collectives reach {LINK_SHARE:.0%} of {chip.link / 1e9:g} GB/s per device"
    f"{network} (the share is assumed)",
    "the collectives are those of the compiled program"
    if compiled
    else "the collectives are those that the mesh needs, not a compiled "
    "program's",
    "communication is hidden behind products as far as these take longer; "
    "input, evaluation and checkpoints take no time",
    *copies,
    f"source of the device's figures: {chip.source}",
  )
