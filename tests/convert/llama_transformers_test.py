"""Plain language models in transformers, where it is installed beside JAX."""

import dataclasses
import pathlib

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import RotaryConfig
from moh_jax.convert import llama_config
from moh_jax.convert.checkpoints import convert, export
from moh_jax.inference.restore import restore
from tests.convert import tiny_llm

pytestmark = pytest.mark.transformers

# Plain models that transformers computes, one thing each.
_PLAIN = {
  "gqa": {},
  "wide_heads": {"head_dim": 10},
  "qwen2": {"qkv_bias": True},
  "qwen3_tied": {"qk_norm": True, "tie_embeddings": True, "num_kv_heads": 6},
  "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
  "norm_eps": {"norm_eps": 1e-2, "rope": RotaryConfig(theta=50.0)},
  "linear": {
    "rope": RotaryConfig(scaling="linear", factor=4.0),
    "max_length": 256,
  },
  "dynamic": {
    "rope": RotaryConfig(scaling="dynamic", factor=2.0, original_length=8),
    "max_length": 16,
  },
  "yarn_options": {
    "rope": RotaryConfig(
      theta=100.0,
      scaling="yarn",
      factor=4.0,
      original_length=16,
      beta_fast=4.0,
      beta_slow=0.5,
      truncate=False,
      attention_factor=1.3,
    ),
    "qk_norm": True,
  },
  "llama3": {
    "rope": RotaryConfig(
      theta=100.0, scaling="llama3", factor=8.0, original_length=16
    ),
  },
}


class TransformersTest(parameterized.TestCase):
  """What transformers makes of an exported folder, and the reverse."""

  @parameterized.parameters(*_PLAIN)
  def test_computes_our_logits(self, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = dataclasses.replace(tiny_llm.MHA, **_PLAIN[name])
    root = pathlib.Path(self.create_tempdir().full_path)
    tiny_llm.write_folder(root / "hf", model)
    convert("llama", str(root / "hf"), str(root / "ours"))
    folder = root / "again"
    export(str(root / "ours"), str(folder), shard_size=5000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = np.random.default_rng(3).integers(0, 37, (2, 13))
    with torch.no_grad():
      want = theirs(torch.tensor(tokens)).logits.numpy()
    restored = restore(str(root / "ours"))
    with jax.default_matmul_precision("highest"):
      got, _ = restored.model.apply({"params": restored.params}, tokens)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)

    # And what transformers writes, in its own spelling of config.json.
    theirs.save_pretrained(root / "theirs", max_shard_size="6KB")
    convert("llama", str(root / "theirs"), str(root / "third"))
    again = restore(str(root / "third"))
    described = llama_config.to_hf(again.config.model)
    expected = llama_config.to_hf(model)
    for stored in (described, expected):
      stored.pop("moh_jax", None)  # what does not change the outputs
    self.assertEqual(described, expected)
    self.assertEqual(again.config.model.max_length, model.max_length)
    chex.assert_trees_all_equal(again.params, restored.params)


if __name__ == "__main__":
  absltest.main()
