"""Predicts the time of a step from published figures, with assumptions."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.plan.collectives import Collective, devices_along
from moh_jax.plan.memory import Memory
from moh_jax.runtime.topology import Topology
from moh_jax.speed.peaks import published_peak

# What programs reach of published figures. These three are assumptions.
PEAK_SHARE = 0.5
MEMORY_SHARE = 0.8
LINK_SHARE = 0.7
# FLOPs of a step over those of its forward and backward pass: "full" runs the
# forward pass of the layers again.
_RECOMPUTED = {"none": 1.0, "dots": 1.0, "full": 4 / 3}


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
  flops: float,
  memory: Memory,
  collectives: Sequence[Collective],
) -> StepTime:
  """Predicts the time of a step.

  Args:
    config: of the run.
    topology: the devices.
    flops: of a step, for the active heads.
    memory: of a device.
    collectives: of a step.
  """
  peak = published_peak(topology.chip.kind)
  if peak is None:
    raise ValueError(f"no published peak of {topology.chip.kind!r} is known")
  flops *= _RECOMPUTED[config.model.remat]
  state = memory.parameters + memory.optimizer + memory.ema
  return StepTime(
    products=flops / (topology.devices * peak * PEAK_SHARE),
    # Read and written once, and the gradients read.
    update=(2 * state + memory.parameters)
    / (topology.chip.memory_speed * MEMORY_SHARE),
    communication=sum(seconds(one, topology) for one in collectives),
  )


def seconds(collective: Collective, topology: Topology) -> float:
  """Seconds that a device sends for a collective.

  Of n devices each sends (n - 1) / n of the array, in an all-reduce twice that.
  What crosses hosts goes through the adapters of the group's devices; a TPU's
  slice has one network.
  """
  chip = topology.chip
  group = len(collective.devices)
  hosts = {device // chip.per_host for device in collective.devices}
  crossing = 1 if chip.platform == "tpu" else len(hosts)
  inside = group // crossing
  size = collective.bytes * (2 if collective.kind == "all-reduce" else 1)
  if collective.kind == "collective-permute":
    speed = chip.network if crossing > 1 else chip.link
    return size / (speed * LINK_SHARE)
  # Along a ring of hosts every host sends its part of the array on.
  time = size * (inside - 1) / inside / chip.link
  time += size * (crossing - 1) / crossing / (inside * chip.network)
  return time / LINK_SHARE


def expected_collectives(
  config: Config, mesh: Mapping[str, int], parameters: int
) -> tuple[Collective, ...]:
  """The collectives that a step should have, before it is compiled.

  In each microbatch the devices of `fsdp` put the parameters together in the
  compute dtype for the forward and for the backward pass and add up the
  gradients; those of `data` add them up too; those of `tensor` add up the
  results of attention and of the MLP in each pass.

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
  add("all-reduce", "data", times, size / mesh["fsdp"])
  shards = mesh["data"] * mesh["fsdp"]
  examples = config.data.batch_size / (shards * times)
  passes = 3 if config.model.remat == "full" else 2
  length = getattr(config.data, "sequence_length", None)
  for group in config.model.layer_groups():
    tokens = examples * (length or group.tokens)
    count = 2 * passes * group.depth * times
    each = tokens * group.width * dtype.itemsize
    add("all-reduce", "tensor", count, each)
  return tuple(found)


def assumptions(topology: Topology, compiled: bool) -> tuple[str, ...]:
  """What a prediction takes for granted, a sentence each."""
  chip = topology.chip
  peak = published_peak(chip.kind)
  network = f", {chip.network / 1e9:g} GB/s to other hosts"
  return (
    f"products reach {PEAK_SHARE:.0%} of {peak / 1e12:g} TFLOP/s (published "
    "for bfloat16; the share is assumed)",
    f"the update reaches {MEMORY_SHARE:.0%} of {chip.memory_speed / 1e9:g} GB/s"
    " of memory (the share is assumed)",
    f"collectives reach {LINK_SHARE:.0%} of {chip.link / 1e9:g} GB/s per device"
    f"{network if chip.platform == 'gpu' else ''} (the share is assumed)",
    "the collectives are those of the compiled program"
    if compiled
    else "the collectives are those that the mesh needs, not a compiled "
    "program's",
    "communication is hidden behind products as far as these take longer; "
    "input, evaluation and checkpoints take no time",
    f"source of the device's figures: {chip.source}",
  )
