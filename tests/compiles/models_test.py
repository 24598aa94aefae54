"""Training steps for GPUs and TPUs: their kernels, arrays and memory.

About a minute for each; run with `pytest -n 0 -m compiles tests/compiles`.
"""

import math

import pytest
from absl.testing import absltest, parameterized

from tests.compiles import programs

pytestmark = pytest.mark.compiles

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
  return sum(n for call, n in calls.items() if "triton" in call) + sum(
    n for call, n in calls.items() if "mosaic_gpu" in call
  )


class TrainingStepTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  def test_kernels_are_called_and_no_logits_are_kept(self, name, target, mesh):
    tokens, depth, heads, batch = _MODELS[name]
    temporaries = {}
    for router in (True, False):
      run = programs.training_run(
        name, tokens, batch, depth=depth, router=router
      )
      compiled = programs.compile_step(run, target, **mesh)
      memory = compiled.memory_analysis()
      temporaries[router] = memory.temp_size_in_bytes
      text = compiled.as_text()
      calls = programs.kernel_calls(text)
      # Forward, and one or two for the gradients.
      self.assertGreaterEqual(_kernels(target, name, calls), 2, calls)
      tensor = mesh.get("tensor", 1)
      own = batch // (math.prod(mesh.values()) // tensor)
      logits = own * (heads // tensor) * tokens * tokens
      self.assertNotIn(logits, programs.square_arrays(text, tokens))
    self.assertLessEqual(temporaries[True], 1.2 * temporaries[False])


if __name__ == "__main__":
  absltest.main()
