"""Plans of the large runs, compiled for GPUs and TPUs that are not here.

Each but the first two, small ones, is a row of docs/plan.md. Minutes each:

  python -m pytest -n 0 -m compiles tests/compiles/plan_test.py
"""

import pytest
from absl.testing import absltest, parameterized

from moh_jax.runtime.devices import missing_packages, parse_topology
from moh_jax.runtime.steps import load_config
from moh_jax.training.plan import make_plan

pytestmark = pytest.mark.compiles

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
    compiled, memory = plan.compiled, plan.memory
    self.assertIsNotNone(compiled, plan.not_compiled)
    self.assertTrue(compiled.fits, compiled)
    if plan.topology.chip.platform == "gpu":
      self.assertEqual(compiled.arguments, memory.arguments)
    # TPUs pad the last two dimensions of arrays.
    self.assertGreaterEqual(compiled.arguments, memory.arguments)
    self.assertLess(compiled.arguments, 1.25 * memory.arguments)
    self.assertNotEmpty(compiled.collectives)


if __name__ == "__main__":
  absltest.main()
