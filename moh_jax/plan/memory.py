"""Bytes of a run on each device, by what they are for."""

import dataclasses
import re
from typing import Any

import jax

from moh_jax.runtime.fits import bytes_on_device
from moh_jax.training.program import Program


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device.

  All but the activations follow from shapes and shardings and are exact.

  Attributes:
    parameters: of the model.
    optimizer: moments and counters.
    ema: averaged parameters.
    batch: of a step.
    gradients: of a step, and those of a microbatch that are added to them.
    activations: what a microbatch keeps for its gradients, estimated.
    host: moments that are in the memory of the device's host between steps
      (`optim.state_memory`). In a step the device has them too: the compiler
      for TPUs fetches all of them before it frees the activations.
  """

  parameters: float
  optimizer: float
  ema: float
  batch: float
  gradients: float
  activations: float
  host: float = 0.0

  @property
  def arguments(self) -> float:
    """Bytes of the train step's arguments: the state and the batch."""
    return self.parameters + self.optimizer + self.ema + self.batch

  @property
  def total(self) -> float:
    """All bytes together: the estimated peak."""
    return self.arguments + self.gradients + self.activations + self.host


def measure(program: Program, accumulation: int, activations: float) -> Memory:
  """The memory of a run.

  Args:
    program: of the run.
    accumulation: microbatches of a step.
    activations: from `activation_bytes`.
  """
  state = program.state
  parameters = bytes_on_device(state.params)
  counters = bytes_on_device((state.step, state.rng))
  return Memory(
    parameters=parameters,
    optimizer=bytes_on_device(state.opt_state) + counters,
    ema=bytes_on_device(state.ema),
    batch=bytes_on_device(program.batch),
    gradients=parameters * (2 if accumulation > 1 else 1),
    activations=activations,
    host=bytes_on_device(state.opt_state, in_host=True),
  )


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


def layouts(params: Any) -> tuple[Layout, ...]:
  """The sharding of every parameter, those that are alike in one row.

  Args:
    params: abstract parameters with shardings.
  """
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
