"""Models of the LLaMA family as two versions of transformers compute them.

The results were recorded by tests/tools/record_transformers.py.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import LLMConfig
from moh_jax.convert import llama, llama_config, rules
from moh_jax.models.llm import LLM
from moh_jax.ops.position import rotation
from tests.convert import tiny_llm
from tests.tools import record_transformers as recorder

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_VERSIONS = ("4.57.6", "5.23.0")


@functools.cache
def _recorded(version: str) -> dict[str, np.ndarray]:
  with np.load(_GOLDENS / f"transformers_{version}.npz") as stored:
    return dict(stored)


def _model(version: str, case: str) -> tuple[LLMConfig, dict[str, np.ndarray]]:
  """Our config from their config.json, and their tensors."""
  meta = json.loads(str(_recorded(version)[f"{case}/meta"]))
  tensors = {n: recorder.weight(n, s) for n, s in meta["shapes"].items()}
  return llama_config.from_hf(meta["config"]), tensors


class RecordedTest(parameterized.TestCase):
  # The two versions differ in their config.json; the numbers are compared with
  # both, and computed once.
  @parameterized.parameters(*recorder.CASES)
  def test_logits_and_greedy_tokens_are_those_of_transformers(self, case):
    config, tensors = _model(_VERSIONS[0], case)
    self.assertEqual(config, _model(_VERSIONS[1], case)[0])
    params = rules.load_params(
      llama.model_rules(config),
      tensors,
      tiny_llm.abstract(config),
      source="recorded",
    )
    tokens = recorder.tokens().astype(np.int32)
    logits, _ = jax.jit(LLM(config).apply)({"params": params}, tokens)
    prompts = tokens[:, : recorder.PROMPT]
    written = tiny_llm.greedy(config, params, prompts, recorder.NEW)
    for version in _VERSIONS:
      recorded = _recorded(version)
      np.testing.assert_allclose(
        logits[:, recorder.PLACES], recorded[f"{case}/logits"], atol=5e-5
      )
      np.testing.assert_array_equal(written, recorded[f"{case}/written"])

  @parameterized.product(version=_VERSIONS, name=tuple(recorder.ROTATIONS))
  def test_yarn_turns_as_in_transformers(self, version, name):
    dim, theta, scaling = recorder.ROTATIONS[name]
    original = scaling["original_max_position_embeddings"]
    tiny = llama_config.to_hf(tiny_llm.MHA) | {
      "head_dim": dim,
      "rope_theta": theta,
      "rope_scaling": scaling,
      "max_position_embeddings": original,
    }
    model = llama_config.from_hf(tiny)
    self.assertEqual(model.max_length, original * scaling["factor"])
    # One token turns by at most a radian, so the angle can be read off.
    by = rotation(jnp.array([[1]]), model.rope, dim)
    cos, sin = (np.asarray(part[0, 0], np.float64) for part in (by.cos, by.sin))
    *frequencies, factor = _recorded(version)[f"rotation/{name}"]
    np.testing.assert_allclose(np.arctan2(sin, cos), frequencies, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(sin, cos), factor, rtol=1e-6)
