"""Exported language models in transformers: `pytest -m transformers`.

PyTorch and transformers may be those of another Python, which
MOH_JAX_TRANSFORMERS_PYTHON names; it needs no JAX.
"""

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.convert.checkpoints import convert
from moh_jax.inference.restore import restore
from tests.convert import transformers_cases
from tests.folders import FolderTest

pytestmark = pytest.mark.transformers

_ATTENTIONS = ("eager", "sdpa")
_CASES = tuple(transformers_cases.CASES)
# Transformers rotates by the longest text so far, its padding included, and
# without a cache all tokens again.
_OTHERS = {("dynamic", "logits_padded"), ("dynamic", "greedy_none")}


class TransformersTest(FolderTest):
  @classmethod
  def setUpClass(cls):
    """Runs transformers_checks.py on all cases."""
    super().setUpClass()
    cls.folder = cls.shared_folder() / "cases"
    transformers_cases.write_all(cls.folder)
    measure = transformers_cases.measure
    cls.measured = measure("transformers_checks.py", cls.folder)

  @parameterized.product(name=_CASES, form=_ATTENTIONS)
  def test_outputs_and_gradients_are_ours(self, name, form):
    found = self.measured[name]
    for key in ("logits", "logits_padded", "logits_last"):
      if (name, key) not in _OTHERS:
        self.assertLess(found[f"{form}/{key}"], 1e-4, key)
    for key in ("balance", "balance_padded"):
      self.assertLess(found.get(f"{form}/{key}", 0), 1e-5, key)
    self.assertLess(found[f"{form}/accumulated"], 1e-5)
    for key, calls in (("gradients", 1), ("gradients_again", 2)):
      self.assertLess(found[f"{form}/{key}"], 1e-4, key)
      self.assertEqual(found[f"{form}/{key}_calls"], calls, key)

  @parameterized.parameters(*_CASES)
  def test_greedy_tokens_are_ours(self, name):
    found = self.measured[name]
    equal = {key: x for key, x in found.items() if "/greedy_" in key}
    self.assertLen(equal, 6)
    wrong = {key.partition("/")[2] for key, same in equal.items() if not same}
    self.assertEmpty({(name, key) for key in wrong} - _OTHERS)

  @parameterized.parameters(*_CASES)
  def test_routers_stay_float32(self, name):
    half = self.measured[name]["bfloat16"]
    self.assertTrue(np.isfinite(half["logits"]))
    self.assertEqual(half["projections"], "torch.bfloat16")
    learned = transformers_cases.model(name).router.kind == "two_stage"
    self.assertEqual(half["routers"], ["torch.float32"] * learned)

  @parameterized.product(name=_CASES, which=("hf", "again"))
  def test_comes_back_bit_for_bit(self, name, which):
    self.assertLess(self.measured[name]["again"], 1e-4)
    model = transformers_cases.model(name)
    case = self.folder / name
    kind = "moh-hf" if (case / "hf" / "modeling_moh.py").exists() else "llama"
    convert(kind, str(case / which), str(self.root / "out"))
    restored = restore(str(self.root / "out"))
    self.assertEqual(restored.config.model, model)
    jax.tree.map(
      np.testing.assert_array_equal,
      restored.params,
      transformers_cases.params(model),
    )
