"""Estimated memory against what XLA says of the compiled step."""

import dataclasses

import jax
from absl.testing import absltest, parameterized

from moh_jax.plan import memory
from moh_jax.plan.activations import activation_bytes
from moh_jax.runtime import sharding
from moh_jax.training.program import make_program
from moh_jax.training.task import task_builder
from tests.training import tiny

# Of the estimated peak over XLA's, either way.
_FACTOR = 2
_CPU = jax.sharding.AbstractDevice(
  device_kind="cpu", num_cores=None, platform="cpu"
)


def _run(family, accumulation, mesh):
  make = {"dit": tiny.dit_config, "llm": tiny.llm_config}
  run = make[family](
    mesh=mesh,
    model=tiny.ALIKE.get(family, {}),
    data={"batch_size": 64},
    optim={"accumulation": accumulation},
  )
  if family == "llm":
    model = dataclasses.replace(run.model, max_length=128, width=64)
    data = dataclasses.replace(run.data, sequence_length=128)
    run = dataclasses.replace(run, model=model, data=data)
  return run


class EstimateTest(parameterized.TestCase):
  @parameterized.parameters(
    ("llm", 2, tiny.MESH),
    ("dit", 2, {"data": 2, "fsdp": 4}),
    ("llm", 1, {**tiny.MESH, "data": 1, "sequence": 2}),
  )
  def test_memory_is_that_of_the_compiled_step(self, family, parts, mesh):
    run = _run(family, parts, mesh)
    objective = task_builder(run).make_objective(run)
    mesh = sharding.make_mesh(run.mesh)
    program = make_program(run, objective, mesh)
    with sharding.use_mesh(mesh):
      compiled = program.step.lower(program.state, program.batch).compile()
    found = compiled.memory_analysis()
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    examples = run.data.batch_size // shards // parts
    activations = activation_bytes(
      *(objective, _CPU, examples, mesh.shape["tensor"]),
      mesh.shape["sequence"],
    )
    estimate = memory.measure(program, parts, activations)
    self.assertEqual(estimate.arguments, found.argument_size_in_bytes)
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    peak = found.argument_size_in_bytes + outputs + found.temp_size_in_bytes
    self.assertLess(estimate.total, _FACTOR * peak)
    self.assertGreater(estimate.total, peak / _FACTOR)


if __name__ == "__main__":
  absltest.main()
