"""What training steps for GPUs and TPUs leave in the memory of their host."""

import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import apply_overrides
from tests.compiles import programs

pytestmark = pytest.mark.compiles


def _memory(target, section, **fields):
  run = programs.training_run("moh-llm-b-50", 512, 4, depth=2, router=True)
  run = apply_overrides(run, section, **fields)
  compiled = programs.compile_step(run, target, fsdp=4)
  return compiled.memory_analysis()


class HostMemoryTest(parameterized.TestCase):
  @parameterized.parameters("h100:4", "v5e:2x2")
  def test_the_optimizers_state_is_no_argument_on_the_device(self, target):
    here = _memory(target, "optim", state_memory="device")
    host = _memory(target, "optim", state_memory="host")
    self.assertEqual(here.host_argument_size_in_bytes, 0)
    moved = here.argument_size_in_bytes - host.argument_size_in_bytes
    self.assertGreater(moved, here.argument_size_in_bytes / 2)
    self.assertAlmostEqual(
      host.host_argument_size_in_bytes / moved, 1, delta=0.02
    )

  @parameterized.parameters("h100:4", "v5e:2x2")
  def test_kept_results_lie_in_the_hosts_memory(self, target):
    dots = _memory(target, "model", remat="dots")
    offload = _memory(target, "model", remat="offload")
    self.assertEqual(dots.host_temp_size_in_bytes, 0)
    self.assertGreater(offload.host_temp_size_in_bytes, 1e6)


if __name__ == "__main__":
  absltest.main()
