"""config.json of transformers: what is read, refused and written."""

import contextlib
import dataclasses
import json

from absl.testing import parameterized

from moh_jax.config import (
  RotaryConfig,
  RouterConfig,
  released_model,
  released_models,
)
from moh_jax.convert import llama_config
from tests.convert import tiny_llm, transformers_cases
from tests.folders import FolderTest

# Of meta-llama/Meta-Llama-3-8B, what bears on the network.
_LLAMA3 = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 8192,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "vocab_size": 128256,
}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_LLAMA, _OURS = "LlamaForCausalLM", "MoHLlamaForCausalLM"
_MAPPED = {"auto_map": {"AutoModelForCausalLM": "modeling_llama.Llama"}}
_ABSENT = "absent"
_SLIDING = {**_QWEN2, "sliding_window": 100, "use_sliding_window": True}


def _read(**changes):
  stored = {**_LLAMA3, **changes}
  kept = {k: v for k, v in stored.items() if v != _ABSENT}
  return llama_config.from_hf(kept)


def _rope(scaling="none", **fields):
  return RotaryConfig(**{"theta": 500000.0, "scaling": scaling, **fields})


class ReadTest(FolderTest):
  def test_the_registered_models(self):
    self.assertEqual(_read(), released_model("llama3-8b"))
    model = llama_config.moh_llama3(_read(vocab_size=160896))
    self.assertEqual(model, released_model("moh-llama3-8b"))

  @parameterized.parameters(
    # Keys, and the fields in which the model is not LLaMA3's.
    ({"num_key_value_heads": _ABSENT}, {"num_kv_heads": 32}),
    # Other architectures, and what a key means that they lack.
    ({**_QWEN2, "attention_bias": True}, {"qkv_bias": True}),
    ({**_QWEN3, "head_dim": _ABSENT}, {"qk_norm": True, "head_dim": 128}),
    ({**_MISTRAL, "sliding_window": 8192, "num_key_value_heads": _ABSENT},
     {"num_kv_heads": 8}),
    # Sliding windows bound the texts, which is said.
    ({**_MISTRAL, "sliding_window": 100}, {"max_length": 100}),
    ({**_MISTRAL, "sliding_window": _ABSENT}, {"max_length": 4096}),
    ({"sliding_window": 100}, {}),
    (_SLIDING, {"qkv_bias": True, "max_length": 100}),
    ({**_SLIDING, "use_sliding_window": False}, {"qkv_bias": True}),
    ({**_SLIDING, "max_window_layers": 32}, {"qkv_bias": True}),
    ({**_SLIDING, "max_window_layers": 32,
      "layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
     {"qkv_bias": True, "max_length": 100}),
    # RoPE of which no results are recorded.
    ({"rope_scaling": {"type": "linear", "factor": 4.0}},
     {"rope": _rope("linear", factor=4.0), "max_length": 4 * 8192}),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}},
     {"rope": _rope("dynamic", factor=4.0, original_length=8192),
      "max_length": 4 * 8192}),
    # Keys without an effect.
    ({"pad_token_id": 3, "dtype": "bfloat16", "temperature": 0.6,
      "is_decoder": False}, {}),
  )  # fmt: skip
  def test_keys_are_read_as_transformers_reads_them(self, keys, fields):
    said = contextlib.nullcontext()
    if fields.get("max_length", 8192) < 8192:
      said = self.assertLogs(level="WARNING")
    with said as logs:
      model = _read(**keys)
    expected = dataclasses.replace(released_model("llama3-8b"), **fields)
    self.assertEqual(model, expected)
    if logs:
      self.assertRegex(logs.output[0], "sliding_window=.*embeddings=8192")

  @parameterized.parameters(
    ({"model_type": "gemma"}, "model_type='gemma' must be one of llama"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' must be one of .'silu'"),
    ({**_MISTRAL, "sliding_window": 0}, "model.max_length=0 must be"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.* must be"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope|short_"),
    ({"rope_scaling": {"type": "linear", "factor": "x"}}, "rope.factor='x'"),
    (_MAPPED, "--from moh-llama3"),
    ({"model_type": "moh_llama"}, "--from moh-hf"),
    ({}, "--from moh-llama3"),  # with a modeling file beside it
  )  # fmt: skip
  def test_other_networks_are_refused_by_field_and_value(self, changes, regex):
    path = self.root / "config.json"
    path.write_text(json.dumps(_LLAMA3 | changes))
    if not changes:
      (self.root / "modeling_llama.py").write_text("raise SystemExit")
    with self.assertRaisesRegex(ValueError, f"config.json: .*{regex}"):
      llama_config.read_config(path)


_BIASES = {"qkv_bias": True, "out_bias": True}
# Cases that need no code of ours.
_PLAIN = dict.fromkeys(("llama", "linear", "dynamic", "yarn_options"), _LLAMA)
_PLAIN |= {"qwen2": "Qwen2ForCausalLM", "qwen3_tied": "Qwen3ForCausalLM"}
_ORDER = dataclasses.replace(
  tiny_llm.QUERY_NORM,
  head_order=((5, 4, 3, 2, 1, 0),) * 3,
  router=RouterConfig("query_norm", straight_through="all"),
)
_LINEAR = RotaryConfig(scaling="linear", factor=3.0)
_NO_EFFECT = {"rope": RotaryConfig(factor=2.0, original_length=5)}
_NO_EFFECT |= {"norm_eps": 1e-6, "dtype": "bfloat16"}


def _mha(**changes):
  return dataclasses.replace(tiny_llm.MHA, **changes)


# Models, and the architecture that they are written as.
_MODELS = {
  **{
    name: (model, _LLAMA if model.router.kind == "none" else _OURS)
    for name, model in released_models().items()
    if model.family == "llm"
  },
  **{
    name: (transformers_cases.model(name), _PLAIN.get(name, _OURS))
    for name in transformers_cases.CASES
  },
  "qwen3_biases": (_mha(qk_norm=True, **_BIASES), "Qwen3ForCausalLM"),
  # With numbers of no effect, and a length that the factor does not divide.
  "tied": (_mha(tie_embeddings=True, **_NO_EFFECT), _LLAMA),
  "odd_length": (_mha(rope=_LINEAR, max_length=100), _LLAMA),
}


class WriteTest(parameterized.TestCase):
  @parameterized.parameters(*_MODELS)
  def test_comes_back_as_what_transformers_computes(self, name):
    model, architecture = _MODELS[name]
    written = json.loads(json.dumps(llama_config.to_hf(model)))
    self.assertEqual(llama_config.from_hf(written), model)
    self.assertEqual(written["architectures"], [architecture])
    if model.rope.scaling != "none":  # `type` is for older versions
      scaling = written["rope_scaling"]
      self.assertEqual(scaling["type"], model.rope.scaling)
      self.assertEqual(scaling["rope_type"], model.rope.scaling)

  def test_released_llama_needs_no_key_of_ours(self):
    written = llama_config.to_hf(released_model("llama3-8b"))
    self.assertNotIn("moh_jax", written)
    self.assertContainsSubset(_LLAMA3, written)

  def test_our_architecture_has_its_keys(self):
    written = llama_config.to_hf(_ORDER)
    expected = {"model_type": "moh_llama", "head_order": _ORDER.head_order}
    expected |= {"shared_heads": (3, 3, 3), "selected_heads": (1, 1, 1)}
    self.assertContainsSubset(expected, written)
    self.assertEqual(written["router"]["kind"], "query_norm")
    self.assertEqual(written["auto_map"]["AutoModel"], "modeling_moh.MoHModel")
    self.assertNotIn("moh_jax", written)
    written = llama_config.to_hf(_MODELS["heads_by_layer"][0])
    self.assertEqual(written["heads_per_layer"], (6, 9, 3))

  def test_the_release_has_the_config_of_the_plain_llama(self):
    model = released_model("moh-llama3-8b")
    plain = llama_config.to_hf(released_model("llama3-8b"))
    written = llama_config.to_released(model)
    self.assertEqual(written, plain | {"vocab_size": model.vocab_size})

  @parameterized.parameters(
    ({"router": RouterConfig()}, "router.kind: 'two_stage' here, 'query_norm'"),
    ({"top_k": (2, 1, 1)}, r"model.top_k.* here, .* there"),
    ({"head_order": _ORDER.head_order}, "model.head_order"),
    ({"qkv_bias": True}, "no LLaMA"),
    ({"rope": RotaryConfig(scaling="llama3")}, "unscaled RoPE"),
  )
  def test_the_release_computes_no_other_model(self, changes, message):
    model = dataclasses.replace(tiny_llm.QUERY_NORM, **changes)
    with self.assertRaisesRegex(ValueError, f"--to released: .*{message}"):
      llama_config.to_released(model)
