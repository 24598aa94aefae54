"""What compilers say where a step does not fit, or cannot be compiled."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.plan import plan
from moh_jax.plan.compiling import Compiled, refused_sizes
from moh_jax.runtime.devices import parse_topology
from tests.training import tiny

_GIB = 2**30


class RefusedSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
      "for HLO temporaries (33.54G) exceeds available HBM (15.75G).",
      (33.54 * _GIB, 15.75 * _GIB),
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G "
      "of 15.75G hbm.",
      (20.5 * _GIB, 15.75 * _GIB),
    ),
    ("INTERNAL: Used 20.5G of 15.75G hbm.", None),
    ("RESOURCE_EXHAUSTED: no sizes", None),
  )
  def test_are_those_of_the_message(self, error, sizes):
    self.assertEqual(refused_sizes(error), sizes)


class CompilersTest(parameterized.TestCase):
  def _plan(self, **compiler):
    self.enterContext(
      mock.patch.object(plan, "missing_packages", lambda name: ())
    )
    compiled = self.enterContext(
      mock.patch.object(plan, "compile_step", **compiler)
    )
    run = tiny.llm_config(mesh={"data": -1})
    return plan.make_plan(run, parse_topology("v5e-4"), True), compiled

  def test_a_compiler_that_fails_leaves_the_estimate(self):
    found, _ = self._plan(side_effect=ValueError("libtpu 0.0: broken"))
    self.assertTrue(found.fits)
    self.assertEqual(found.run.reason, "libtpu 0.0: broken")

  def test_the_compiler_decides_and_proposals_are_compiled(self):
    full = Compiled("libtpu 0.0", 1.0, False, 1e9, 2e9)
    fits = dataclasses.replace(full, fits=True, total=5e8)
    found, compiled = self._plan(side_effect=[full, full, fits])
    self.assertFalse(found.fits)
    self.assertIs(found.proposal.compiled, fits)
    self.assertEqual(compiled.call_count, 3)


class MissingCompilerTest(absltest.TestCase):
  def test_is_named(self):
    missing = mock.patch.object(
      plan, "missing_packages", lambda name: ("libtpu",)
    )
    run = tiny.llm_config(mesh={"data": -1})
    with missing:
      found = plan.make_plan(run, parse_topology("v5e-4"), True)
    self.assertIsNone(found.run.compiled)
    self.assertIn("libtpu", found.run.reason)


if __name__ == "__main__":
  absltest.main()
