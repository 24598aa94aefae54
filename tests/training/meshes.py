"""Runs of a language model on the meshes of eight fake devices."""

import contextlib
import math

import jax

from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training.step import make_program
from tests.compiles.programs import arrays
from tests.runtime.batches_test import two_slices
from tests.training import tiny

VOCAB, WIDTH = 336, 64
_MODEL = {
  "vocab_size": VOCAB,
  "width": WIDTH,
  "mlp_dim": 96,
  "num_heads": (8, 8),
  "num_kv_heads": 4,
  "shared_heads": (2, 2),
  "top_k": (3, 3),
  "loss_chunk": 8,
}
MESHES = {
  "8": {"data": 8},
  "2,4": {"data": 2, "fsdp": 4},
  "2,4 step": {"data": 2, "fsdp": 4, "gather": "step"},
  "2,2,2": {"data": 2, "fsdp": 2, "tensor": 2},
  "1,2,2,2": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
  "2 slices": {"dcn_data": 2, "data": 1, "fsdp": 2, "tensor": 2},
}


def config_of(form="dense", mesh=None, **sections):
  """A run on a mesh, one device by default."""
  model = _MODEL | sections.pop("model", {}) | {"attention_impl": form}
  mesh = {"data": 1, **(mesh or {})}
  return tiny.llm_config(model=model, mesh=mesh, **sections)


def mesh_of(config):
  """The config's mesh, of fake slices where it has some."""
  axes = (*config.mesh.AXES, "dcn_data")
  size = [getattr(config.mesh, axis) for axis in axes]
  devices = jax.devices()[: math.prod(size)]
  slices = config.mesh.dcn_data > 1
  with two_slices((0, 2, 4, 6)) if slices else contextlib.nullcontext():
    return make_mesh(config.mesh, devices)


def losses(config, steps=3):
  """Those of the first steps."""
  mesh, task, found = mesh_of(config), tiny.make_task(config), []
  program = make_program(config, task, mesh)
  with use_mesh(mesh):
    state, batches = program.init(), task.batches(mesh)
    for _ in range(steps):
      batch = shard_batch(next(batches), mesh)
      state, metrics = program.step(state, batch)
      found.append(float(metrics["loss"]))
  return found


def compiled_step(config):
  """The compiled step, and its mesh."""
  mesh, task = mesh_of(config), tiny.make_task(config)
  program = make_program(config, task, mesh)
  with use_mesh(mesh):
    step = program.step.lower(program.state, program.batch)
  return step.compile(), mesh


def shapes(text: str, dtype: str = "f32") -> set[tuple[int, ...]]:
  """Shapes of a program's arrays of a dtype."""
  return {tuple(shape) for kind, shape in arrays(text) if kind == dtype}
