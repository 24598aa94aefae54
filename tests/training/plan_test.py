"""Plans: memory of the state, predicted times, what compilers say."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.config import without_router
from moh_jax.layers.stack import REMAT_POLICIES
from moh_jax.runtime import devices, sharding
from moh_jax.runtime.devices import parse_topology
from moh_jax.training import plan as plan_lib
from moh_jax.training.compiling import Collective, Compiled
from moh_jax.training.plan import assumptions, make_plan, seconds
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder
from tests.training import tiny

_MESH = {"data": -1, "max_imbalance": 2.0}


def _plan(run, name="v5e-4", compiles=False):
  return make_plan(run, parse_topology(name), compiles)


class MemoryTest(parameterized.TestCase):
  @parameterized.parameters(
    ("llm", tiny.llm_config, tiny.MESH),
    ("dit", tiny.dit_config, {"data": 2, "fsdp": 4}),
    ("llm", tiny.llm_config, {**tiny.MESH, "data": 1, "sequence": 2}),
  )
  def test_state_is_that_of_the_compiled_step(self, family, make, mesh):
    run = make(
      mesh=mesh,
      model=tiny.ALIKE.get(family, {}),
      data={"batch_size": 64},
      optim={"accumulation": 2},
    )
    mesh = sharding.make_mesh(run.mesh)
    objective = task_builder(run).make_objective(run)
    program = make_program(run, objective, mesh)
    with sharding.use_mesh(mesh):
      compiled = program.step.lower(program.state, program.batch).compile()
    found = compiled.memory_analysis()
    memory = _plan(run, "v5e-8").memory
    self.assertEqual(memory.arguments, found.argument_size_in_bytes)
    self.assertEqual(memory.total, memory.arguments)


@functools.cache
def _products(remat):
  run = tiny.llm_config(model={"remat": remat}, mesh=_MESH)
  return _plan(run).step_time.products


class TimeTest(parameterized.TestCase):
  @parameterized.parameters(*REMAT_POLICIES)
  def test_products_that_run_again_take_time(self, remat):
    ratio = _products(remat) / _products("none")
    if remat == "full":
      self.assertAlmostEqual(ratio, 4 / 3)
    elif remat == "attention":
      self.assertBetween(ratio, 1.1, 4 / 3 - 1e-3)
    else:
      self.assertEqual(ratio, 1)

  @parameterized.parameters(16, 2048)
  def test_heads_that_are_computed_take_time(self, length):
    # 16 tokens are too few to leave heads out on any device.
    run = tiny.llm_config(mesh=_MESH, model={"max_length": length})
    data = dataclasses.replace(run.data, sequence_length=length)
    run = dataclasses.replace(run, data=data)
    baseline = dataclasses.replace(run, model=without_router(run.model))
    moh, mha = _plan(run, "v5p-8"), _plan(baseline, "v5p-8")
    comparison = self.assertGreater if length == 16 else self.assertLess
    comparison(moh.step_time.products, mha.step_time.products)
    self.assertEqual(moh.attention[0].heads, 1 if length == 16 else 0.75)


class SlicesTest(parameterized.TestCase):
  def test_what_crosses_slices_is_slower(self):
    one = parse_topology("v5e:2x4")
    two = dataclasses.replace(parse_topology("v5e:2x2"), slices=2)
    self.assertEqual((two.devices, two.hosts), (8, 2))
    data, fsdp = (
      Collective("all-reduce", "f32", (axis,), devices, 1, 1e6)
      for axis, devices in (("data", (0, 4)), ("fsdp", (0, 1, 2, 3)))
    )
    self.assertEqual(seconds(fsdp, one), seconds(fsdp, two))
    self.assertGreater(seconds(data, two), 10 * seconds(data, one))

  def test_a_plan_has_as_many_slices_as_the_config(self):
    run = tiny.llm_config(mesh={**_MESH, "dcn_data": 2, "fsdp": 2})
    plan = _plan(run, "v5e:2x2")
    self.assertEqual(plan.topology.devices, 8)
    self.assertEqual(plan.mesh["data"], 4)
    self.assertTrue(plan.fits)


class CompilerTest(absltest.TestCase):
  def _plan(self, missing=(), **compiler):
    with (
      mock.patch.object(devices, "missing_packages", lambda name: missing),
      mock.patch.object(plan_lib, "compile_step", **compiler),
    ):
      return _plan(tiny.llm_config(mesh={"data": -1}), compiles=True)

  def test_decides_and_its_collectives_take_time(self):
    one = Collective("all-reduce", "f32", ("data",), (0, 1), 1, 1e12)
    full = Compiled("libtpu 0.0", 1.0, False, 1e9, 2e9)
    fits = dataclasses.replace(full, fits=True, collectives=(one,))
    refused, plan = (self._plan(return_value=one) for one in (full, fits))
    self.assertFalse(refused.fits)
    self.assertTrue(plan.fits)
    self.assertGreater(plan.step_time.seconds, 2 * refused.step_time.seconds)
    self.assertIn("collectives reach 70% of ", assumptions(plan)[2])
    self.assertIn("collectives are not counted", assumptions(refused)[2])

  def test_one_that_fails_or_lacks_leaves_the_state(self):
    broken = self._plan(side_effect=ValueError("libtpu 0.0: broken"))
    missing = self._plan(missing=("libtpu",))
    for plan, reason in ((broken, "libtpu 0.0: broken"), (missing, "libtpu")):
      self.assertTrue(plan.fits)
      self.assertIsNone(plan.compiled)
      self.assertIn(reason, plan.not_compiled)


if __name__ == "__main__":
  absltest.main()
