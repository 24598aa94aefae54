"""Plans: memory of a device, and what compilers say of programs."""

import dataclasses
from unittest import mock

import jax
import pytest
from absl.testing import absltest

from moh_jax.runtime.devices import parse_topology
from moh_jax.training import plan as plan_lib
from moh_jax.training.plan import make_plan, used_bytes
from tests.training import tiny

_MESH = {"data": -1}


class PlanTest(absltest.TestCase):
  def test_without_a_compiler_the_state_decides(self):
    plan = make_plan(tiny.llm_config(mesh=_MESH), parse_topology("v5e-4"), True)
    self.assertEqual((plan.fits, plan.total), (True, None))
    self.assertIn("needs the package libtpu", plan.compiler)

  def test_a_plan_has_as_many_slices_as_the_config(self):
    run = tiny.llm_config(mesh={**_MESH, "dcn_data": 2, "fsdp": 2})
    plan = make_plan(run, parse_topology("v5e:2x2"), False)
    self.assertEqual((plan.topology.devices, plan.mesh["data"]), (8, 4))

  def test_the_fewest_microbatches_that_leave_room_are_proposed(self):
    run = tiny.llm_config(mesh=_MESH, data={"batch_size": 32})
    plan = make_plan(run, parse_topology("v5e-4"), False)
    fixed = sum(plan.state.values()) + 2 * plan.state["parameters"]
    grows = plan.limit - fixed
    for times, number in ((1.5, 2), (3, 4), (8, 8), (9, None)):
      plan = dataclasses.replace(plan, total=fixed + times * grows)
      self.assertEqual(plan.accumulation(), number)

  @pytest.mark.integration
  def test_the_compiler_decides(self):
    """That of this machine's devices stands for one of absent devices."""
    sections = {"data": {"batch_size": 64}, "optim": {"accumulation": 2}}
    run = tiny.llm_config(mesh=tiny.MESH, **sections)
    used = mock.Mock(wraps=used_bytes)
    used.side_effect = (
      mock.DEFAULT,
      *(
        jax.errors.JaxRuntimeError(f"{what}: Used 20.5G of 15.75G hbm.")
        for what in ("RESOURCE_EXHAUSTED", "INTERNAL")
      ),
    )
    absent = mock.patch.object(
      plan_lib, "absent_devices", lambda *_: jax.devices()
    )
    version = mock.patch.object(
      plan_lib.importlib.metadata, "version", lambda _: "0.0"
    )
    with absent, version, mock.patch.object(plan_lib, "used_bytes", used):
      fits, full, failed = (
        make_plan(run, parse_topology("v5e-8"), True) for _ in range(3)
      )
    memory = used.call_args_list[0].args[0].memory_analysis()
    self.assertTrue(fits.fits)
    arguments = sum(fits.state.values())
    self.assertEqual(arguments, memory.argument_size_in_bytes)
    self.assertGreater(fits.total, arguments)
    self.assertEqual(fits.compiler, "libtpu 0.0")
    self.assertEqual((full.fits, full.total), (False, 20.5 * 2**30))
    self.assertTrue(failed.fits)  # its state does
    self.assertIn("libtpu 0.0: INTERNAL", failed.compiler)
