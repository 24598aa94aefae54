"""Whole training steps, compiled for devices that are not here."""

import collections
import dataclasses
import math
import re
from typing import Any

from moh_jax.cli.bench import bench_run
from moh_jax.config import Config, MeshConfig, apply_overrides, released_model
from moh_jax.config.layers import without_router
from moh_jax.runtime import sharding
from moh_jax.runtime.devices import absent_devices
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder


def training_run(
  name: str, tokens: int, batch: int, *, depth: int, router: bool
) -> Config:
  """A run of the first layers of a released model in bfloat16.

  Args:
    name: of the released model.
    tokens: N.
    batch: examples of all devices together.
    depth: layers.
    router: False for its multi-head baseline.
  """
  model = released_model(name)
  counts = ("num_heads", "shared_heads", "top_k")
  changes: dict[str, Any] = {x: getattr(model, x)[:depth] for x in counts}
  changes["dtype"] = "bfloat16"
  if model.family == "dit":
    side = math.isqrt(tokens) * model.patch_size
    changes["input_size"] = (side, side)
  else:
    changes["max_length"] = tokens
  model = dataclasses.replace(model, **changes)
  if not router:
    model = without_router(model)
  run = bench_run(model, batch)
  if model.family == "dit":
    return run
  return apply_overrides(run, "data", sequence_length=tokens)


def compile_step(run: Config, target: str, **axes: int) -> Any:
  """Compiles the training step of a run; see `lower_step`."""
  return lower_step(run, target, **axes).compile()


def lower_step(run: Config, target: str, **axes: int) -> Any:
  """Traces and lowers the training step of a run for absent devices.

  Args:
    run: the run.
    target: see `absent_devices`.
    **axes: sizes of the mesh's axes.
  """
  sizes = {"data": 1, **axes}
  devices = absent_devices(target)[: math.prod(sizes.values())]
  mesh = sharding.make_mesh(MeshConfig(**sizes), devices)
  objective = task_builder(run).make_objective(run)
  program = make_program(run, objective, mesh)
  with sharding.use_mesh(mesh):
    return program.step.lower(program.state, program.batch)


def kernel_calls(text: str) -> dict[str, int]:
  """How often a compiled program calls each kernel outside of XLA."""
  calls = re.findall(r'custom_call_target="([^"]+)"', text)
  return dict(collections.Counter(calls))


def square_arrays(text: str, tokens: int) -> set[int]:
  """Sizes of a compiled program's arrays with two dimensions of N elements.

  Args:
    text: of the program.
    tokens: N.
  """
  found = set(re.findall(r"= \w+\[([\d,]+)\]", text))
  shapes = [tuple(map(int, shape.split(","))) for shape in found]
  return {math.prod(x) for x in shapes if x.count(tokens) > 1}
