"""Exported language models in vLLM: `pytest -m vllm`.

vLLM is that of another Python, which MOH_JAX_VLLM_PYTHON names; it needs no
JAX, and its build for CPUs is enough.
"""

import dataclasses
import json
import pathlib
import tempfile

import pytest
from absl.testing import parameterized

from tests.convert import transformers_cases

pytestmark = pytest.mark.vllm

_UNEQUAL = "heads_by_layer"
# vLLM turns a short text by the frequencies of the longest one, transformers
# and we by its own.
_OTHER = {_UNEQUAL, "dynamic"}


class VllmTest(parameterized.TestCase):
  def _serve(self, name, *options):
    """What vllm_checks.py prints of a case, or the end of its errors."""
    folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    # vLLM's attention on CPUs has heads of 32 and more.
    config = dataclasses.replace(
      transformers_cases.model(name), head_dim=32, width=192
    )
    transformers_cases.write(folder, config)
    stored = json.loads((folder / "hf" / "config.json").read_text())
    (self.architecture,) = stored["architectures"]
    return transformers_cases.run_checks(
      "vllm_checks.py", "MOH_JAX_VLLM_PYTHON", folder, *options
    )

  @parameterized.parameters(
    *((name,) for name in sorted({*transformers_cases.CASES} - _OTHER)),
    *((name, "--compile") for name in ("released_gates", "head_order")),
  )
  def test_tokens_of_prompts_served_together_are_ours(self, name, *options):
    found = self._serve(name, *options)
    self.assertIsInstance(found, dict, found)
    self.assertEqual(found["equal"], [found["count"]] * 6)
    if not options:
      own = self.architecture.startswith("MoH")
      expected = "TransformersForCausalLM" if own else self.architecture
      self.assertEqual(found["class"], expected)

  def test_routers_stay_float32_in_bfloat16_models(self):
    found = self._serve("released_gates", "bfloat16")
    self.assertIsInstance(found, dict, found)
    dtypes = found["dtypes"]
    routers = {x: dtype for x, dtype in dtypes.items() if "router" in x}
    self.assertLen(routers, 3)
    self.assertEqual(set(routers.values()), {"torch.float32"})
    self.assertEqual(dtypes["model.norm.weight"], "torch.bfloat16")

  def test_layers_of_unequal_numbers_of_heads_are_refused(self):
    found = self._serve(_UNEQUAL)
    self.assertIsInstance(found, str)
    self.assertIn("config.heads_per_layer is [6, 9, 3]: vLLM serves", found)
