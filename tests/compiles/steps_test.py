"""Training steps compiled for GPUs and TPUs that are not here.

About a minute for each; run with `pytest -n 0 -m compiles tests/compiles`.
"""

import collections
import dataclasses
import math
import re
from typing import Any

import pytest
from absl.testing import parameterized

from moh_jax.cli.bench import bench_run
from moh_jax.config import Config, MeshConfig, apply_overrides, released_model
from moh_jax.config.layers import without_router
from moh_jax.data.infer import resolve_without_data
from moh_jax.runtime.devices import (
  absent_devices,
  missing_packages,
  parse_topology,
)
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.steps import load_config
from moh_jax.training.plan import make_plan
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder
from tests.compiles.programs import read_collectives

pytestmark = pytest.mark.compiles


def _run(
  name: str, tokens: int, batch: int, *, depth: int, router: bool
) -> Config:
  """A run of the first layers of a released model in bfloat16."""
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


def _compile(run: Config, target: str, **axes: int) -> Any:
  """Compiles the training step of a run for absent devices."""
  sizes = {"data": 1, **axes}
  devices = absent_devices(target)[: math.prod(sizes.values())]
  mesh = make_mesh(MeshConfig(**sizes), devices)
  objective = task_builder(run).make_objective(run)
  program = make_program(run, objective, mesh)
  with use_mesh(mesh):
    return program.step.lower(program.state, program.batch).compile()


# Released model, tokens, layers, heads of the layers, and the batch.
_MODELS = {
  "moh-llm-b-50": (4096, 2, 16, 8),
  "moh-dit-b2-75": (1024, 4, 12, 8),
  "moh-llama3-8b": (4096, 2, 32, 4),
}
_MESHES = ({}, {"data": 4}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2})
# The state of two layers and both ends of LLaMA takes 24 GB: no TPU holds that
# alone.
_CASES = [
  (name, target, mesh)
  for name in _MODELS
  for target in ("h100:4", "v5e:2x2", "v6e:2x2")
  for mesh in _MESHES
  if "llama" not in name or "h100" in target or "fsdp" in mesh
]


def _kernels(target: str, name: str, calls: dict[str, int]) -> int:
  """Calls of attention kernels, of the kind that the target should have."""
  if not target.startswith("h100"):
    return calls.get("tpu_custom_call", 0)
  if "dit" in name:
    return sum(n for call, n in calls.items() if call.startswith("__cudnn$"))
  return sum(n for call, n in calls.items() if "mosaic_gpu" in call)


class TrainingStepTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_kernels_are_called_and_no_logits_are_kept(self, name, target, mesh):
    tokens, depth, heads, batch = _MODELS[name]
    temporaries = {}
    for router in (True, False):
      run = _run(name, tokens, batch, depth=depth, router=router)
      compiled = _compile(run, target, **mesh)
      memory = compiled.memory_analysis()
      temporaries[router] = memory.temp_size_in_bytes
      text = compiled.as_text()
      found = re.findall(r'custom_call_target="([^"]+)"', text)
      calls = collections.Counter(found)
      # Forward, and one or two for the gradients.
      self.assertGreaterEqual(_kernels(target, name, calls), 2, calls)
      tensor = mesh.get("tensor", 1)
      own = batch // (math.prod(mesh.values()) // tensor)
      logits = own * (heads // tensor) * tokens * tokens
      for found in set(re.findall(r"= \w+\[([\d,]+)\]", text)):
        shape = tuple(map(int, found.split(",")))
        square = shape.count(tokens) > 1
        self.assertFalse(square and math.prod(shape) == logits, shape)
    self.assertLessEqual(temporaries[True], 1.2 * temporaries[False])


# All but the first two, small ones, are of docs/launching.md; minutes each.
_PLANS = (
  ("configs/llm_stdlib.py:moh", "h100:8"),
  ("configs/llm_stdlib.py:moh", "v5e-4", "mesh.dcn_data=2"),
  ("configs/vit.py:b50", "v5e-8", "optim.accumulation=8"),
  ("configs/dit.py:xl2_90", "v5e-16", "mesh.data=1", "mesh.fsdp=16"),
  ("configs/llm.py:b50", "v5e-64", "mesh.data=1", "mesh.fsdp=64"),
  ("configs/llama3_moh.py:stage2", "v5p-64", "optim.accumulation=64"),
  ("configs/llama3_moh.py:stage2", "h100:16", "optim.accumulation=128"),
  ("configs/llama3_moh.py:70b_stage2", "v5p:8x8x8"),
  ("configs/llama3_moh.py:70b_stage2", "h100:128", "optim.accumulation=16"),
)


class PlanTest(parameterized.TestCase):
  @parameterized.parameters(*_PLANS)
  def test_compiles_and_fits(self, config, name, *overrides):
    if missing := missing_packages(name):
      self.skipTest(f"needs {', '.join(missing)}")
    run = load_config(config, overrides)
    plan = make_plan(run, parse_topology(name), compiles=True)
    self.assertIsNotNone(plan.total, plan.compiler)
    self.assertTrue(plan.fits)
    self.assertGreater(plan.total, sum(plan.state.values()))


class ExchangeTest(parameterized.TestCase):
  @parameterized.parameters(
    ("configs/llm.py:b75", "h100:4", 4e9),
    ("configs/llm.py:b50", "v5e-64", 32e9, "mesh.data=1", "mesh.fsdp=64"),
  )
  def test_gradients_are_exchanged_once_a_step(
    self, config, name, most, *overrides
  ):
    if missing := missing_packages(name):
      self.skipTest(f"needs {', '.join(missing)}")
    run, _ = resolve_without_data(load_config(config, overrides))
    mesh = make_mesh(run.mesh, absent_devices(name))
    program = make_program(run, task_builder(run).make_objective(run), mesh)
    with use_mesh(mesh):
      step = program.step.lower(program.state, program.batch)
    found = read_collectives(step.compile().as_text(), dict(mesh.shape))
    self.assertLessEqual(sum(one.bytes for one in found), most)
    # The routers' sums of each microbatch, and the gradients in some parts.
    count = sum(one.count for one in found)
    self.assertLessEqual(count, 2 * run.optim.accumulation)
