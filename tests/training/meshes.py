"""Runs of every family on the meshes of eight fake devices."""

import math
import pathlib
import re
from contextlib import nullcontext

import jax

from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training.step import make_program
from tests.compiles.programs import (
  arrays,
  computations,
  count_runs,
  ints,
  read_collectives,
)
from tests.runtime.batches_test import two_slices
from tests.training import tiny

VOCAB, WIDTH = 336, 64
MODELS = {
  "llm": {
    "vocab_size": VOCAB,
    "width": WIDTH,
    "mlp_dim": 96,
    "num_heads": (8, 8),
    "num_kv_heads": 4,
    "shared_heads": (2, 2),
    "top_k": (3, 3),
    "loss_chunk": 8,
  },
  "dit": {
    "input_size": (24, 24),  # as large as one device has all logits at once
    "patch_size": 2,
    "width": 64,
    "num_heads": (8, 8),
    "head_dim": 8,
    "shared_heads": (2, 2),
    "top_k": (3, 3),
  },
  "vit": {
    "image_size": (16, 16),
    "embed_dims": (48, 96),  # their MLPs, 8/3 as wide, can be split in two
    "depths": (1, 1),
    "num_heads": (4, 8),
    "shared_heads": (2, 2),
    "top_k": (1, 3),
    "mlp_ratios": (4, 4),
    "sr_ratios": (2, 1),
    "drop_path": 0.0,
  },
}
_CONFIGS = {
  "llm": tiny.llm_config,
  "dit": tiny.dit_config,
  "vit": tiny.deterministic_config,
}
MESHES = {
  "8": {"data": 8},
  "2,4": {"data": 2, "fsdp": 4},
  "2,4 step": {"data": 2, "fsdp": 4, "gather": "step"},
  "2,2,2": {"data": 2, "fsdp": 2, "tensor": 2},
  "1,2,2,2": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
  "2 slices": {"dcn_data": 2, "data": 1, "fsdp": 2, "tensor": 2},
}
# Of a version of jax: other versions of XLA may exchange otherwise.
_MINOR = ".".join(jax.__version__.split(".")[:2])
GOLDEN = pathlib.Path(__file__).parent / f"collectives/jax_{_MINOR}.json"
_DOT = re.compile(
  r"= \w+\[([\d,]*)\]\S* dot\((?:\w+\[([\d,]*)\]\S* )?%?([\w.-]+)"
)


def config_of(family="llm", form="dense", mesh=None, **sections):
  """The family's run on a mesh, one device by default."""
  model = MODELS[family] | sections.pop("model", {})
  if family != "vit":  # its forms compute every head
    model["attention_impl"] = form
  else:
    # In a step each device computes the position bias, in which no example is.
    # That should be little beside its examples, so it has four.
    sections.setdefault("data", {"batch_size": 32})
  mesh = {"data": 1, **(mesh or {})}
  return _CONFIGS[family](model=model, mesh=mesh, **sections)


def mesh_of(config):
  """The config's mesh, of fake slices where it has some."""
  axes = (*config.mesh.AXES, "dcn_data")
  size = [getattr(config.mesh, axis) for axis in axes]
  devices = jax.devices()[: math.prod(size)]
  with two_slices((0, 2, 4, 6)) if config.mesh.dcn_data > 1 else nullcontext():
    return make_mesh(config.mesh, devices)


def losses(config, steps=3):
  """Those of the first steps."""
  mesh, task, found = mesh_of(config), tiny.make_task(config), []
  program = make_program(config, task, mesh)
  with use_mesh(mesh):
    state, batches = program.init(), task.batches(mesh)
    for _ in range(steps):
      state, metrics = program.step(state, shard_batch(next(batches), mesh))
      found.append(float(metrics["loss"]))
  return found


def compiled_step(config):
  """Text of the compiled step, and its mesh."""
  mesh, task = mesh_of(config), tiny.make_task(config)
  program = make_program(config, task, mesh)
  with use_mesh(mesh):
    step = program.step.lower(program.state, program.batch)
  return step.compile().as_text(), mesh


def exchanges(text, mesh):
  """The collectives of a step, one row for each kind, axes and dtype.

  Args:
    text: of the compiled step.
    mesh: its devices.

  Returns:
    {"kind axes dtype": [how often in a step, bytes of all]}, as in `GOLDEN`.
  """
  rows = {}
  for one in read_collectives(text, dict(mesh.shape)):
    name = f"{one.kind} {'+'.join(one.axes)} {one.dtype}"
    row = rows.setdefault(name, [0, 0])
    row[0] += one.count
    row[1] += round(one.bytes)
  return dict(sorted(rows.items()))


def shapes(text: str, dtype: str = "f32") -> set[tuple[int, ...]]:
  """Shapes of a program's arrays of a dtype."""
  return {tuple(shape) for kind, shape in arrays(text) if kind == dtype}


def dot_flops(text: str) -> int:
  """Multiplications and additions of a program's matrix products.

  The body of a loop counts as often as it runs, where the compiler knows it.

  Args:
    text: of the compiled program.
  """
  bodies = computations(text)
  runs = count_runs(bodies)
  return sum(
    runs[name] * _flops_of(line, lines)
    for name, lines in bodies.items()
    for line in lines
  )


def _flops_of(line: str, body: list[str]) -> int:
  """Of one instruction; 0 if it is no product."""
  match = _DOT.search(line)
  if not match:
    return 0
  out, left, operand = match.groups()
  if left is None:
    made = rf"\s+(?:ROOT )?%?{re.escape(operand)} = \w+\[([\d,]*)\]"
    left = next(m[1] for x in body if (m := re.match(made, x)))
  dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1]
  inner = [ints(left)[i] for i in ints(dims)]
  return 2 * math.prod(ints(out)) * math.prod(inner)
