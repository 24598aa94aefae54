"""config.json of transformers: what is read, refused and written."""

import dataclasses
import json
import pathlib

from absl.testing import absltest, parameterized

from moh_jax.config import (
  RotaryConfig,
  RouterConfig,
  get_family,
  released_model,
  without_router,
)
from moh_jax.convert import llama_config
from tests.convert import tiny_llm

# Of meta-llama/Meta-Llama-3-8B, without what does not bear on the network.
_LLAMA3 = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "bos_token_id": 128000,
  "eos_token_id": 128001,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 8192,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": None,
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "vocab_size": 128256,
}
_LLAMA31 = {
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
  "rope_type": "llama3",
}


def _read(**changes):
  stored = {**_LLAMA3, **changes}
  return llama_config.from_hf(
    {k: v for k, v in stored.items() if v != "absent"}
  )


def _sliding_qwen(**changes):
  return {
    "architectures": ["Qwen2ForCausalLM"],
    "sliding_window": 100,
    "use_sliding_window": True,
    "max_window_layers": 28,
    **changes,
  }


class ReadTest(parameterized.TestCase):
  def test_llama3_is_the_registered_model(self):
    self.assertEqual(_read(), released_model("llama3-8b"))

  def test_moh_llama3_is_the_registered_model(self):
    model = llama_config.moh_llama3(_read(vocab_size=160896))
    self.assertEqual(model, released_model("moh-llama3-8b"))

  def test_first_llama_has_a_kv_head_for_each(self):
    model = _read(
      num_key_value_heads="absent", attention_bias="absent", rope_theta="absent"
    )
    self.assertEqual(model.num_kv_heads, 32)
    self.assertEqual(model.rope.theta, 10000.0)
    self.assertFalse(model.qkv_bias)

  def test_biases_are_of_all_four_projections(self):
    model = _read(attention_bias=True, mlp_bias=True)
    self.assertTrue(model.qkv_bias and model.out_bias and model.mlp_bias)

  def test_qwen2_has_biases_of_three_projections(self):
    model = _read(
      architectures=["Qwen2ForCausalLM"],
      sliding_window=4096,
      use_sliding_window=False,
      attention_bias="absent",
    )
    self.assertTrue(model.qkv_bias)
    self.assertFalse(model.out_bias)

  @parameterized.parameters(None, 8192, 10000)
  def test_mistral_whose_window_never_closes(self, window):
    model = _read(architectures=["MistralForCausalLM"], sliding_window=window)
    self.assertEqual(model, released_model("llama3-8b"))

  def test_window_bounds_the_texts(self):
    for changes, longest in (
      ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
      (
        {"architectures": ["MistralForCausalLM"], "sliding_window": "absent"},
        4096,
      ),
      ({"architectures": ["LlamaForCausalLM"], "sliding_window": 100}, 8192),
      (_sliding_qwen(), 100),
      (_sliding_qwen(max_window_layers=32), 8192),
      (_sliding_qwen(use_sliding_window=False), 8192),
      (_sliding_qwen(layer_types=["full_attention"] * 32), 8192),
      (
        _sliding_qwen(
          max_window_layers=32,
          layer_types=["full_attention"] * 31 + ["sliding_attention"],
        ),
        100,
      ),
    ):
      with self.subTest(**changes):
        self.assertEqual(_read(**changes).max_length, longest)

  def test_window_is_said(self):
    with self.assertLogs(level="WARNING") as logs:
      _read(architectures=["MistralForCausalLM"], sliding_window=100)
    self.assertRegex(logs.output[0], "sliding_window=100.*embeddings=8192")

  def test_qwen3_norms_queries_and_keys(self):
    model = _read(architectures=["Qwen3ForCausalLM"], head_dim="absent")
    self.assertTrue(model.qk_norm)
    self.assertFalse(model.qkv_bias or model.out_bias)
    self.assertEqual(model.head_dim, 128)
    biased = _read(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    self.assertTrue(biased.qkv_bias and biased.out_bias)

  @parameterized.parameters(("LlamaForCausalLM", 32), ("MistralForCausalLM", 8))
  def test_absent_keys_mean_what_the_architecture_says(self, name, kv_heads):
    model = _read(architectures=[name], num_key_value_heads="absent")
    self.assertEqual(model.num_kv_heads, kv_heads)

  def test_yarn_with_and_without_its_options(self):
    yarn = {
      "rope_type": "yarn",
      "factor": 4,
      "original_max_position_embeddings": 4096,
    }
    model = _read(rope_scaling=yarn)
    expected = RotaryConfig(
      theta=500000.0, scaling="yarn", factor=4.0, original_length=4096
    )
    self.assertEqual(model.rope, expected)
    self.assertEqual(model.max_length, 4 * 4096)
    options = {
      "beta_fast": 16.0,
      "beta_slow": 2.0,
      "truncate": False,
      "attention_factor": 1.5,
    }
    model = _read(rope_scaling=yarn | options | {"mscale": 1.0})
    self.assertEqual(model.rope, dataclasses.replace(expected, **options))

  def test_yarn_without_original_length_has_that_of_the_training(self):
    model = _read(rope_scaling={"type": "yarn", "factor": 2.0})
    self.assertEqual(model.rope.original_length, 8192)
    self.assertEqual(model.max_length, 16384)

  def test_keys_of_no_effect_are_no_obstacle(self):
    model = _read(
      pad_token_id=3, dtype="bfloat16", temperature=0.6, is_decoder=False
    )
    self.assertEqual(model, _read())

  def test_model_type_stands_in_for_architectures(self):
    model = _read(architectures="absent", model_type="qwen2")
    self.assertTrue(model.qkv_bias)

  def test_head_dim_is_free(self):
    self.assertEqual(_read(head_dim=64).head_dim, 64)
    self.assertEqual(_read(head_dim=None).head_dim, 128)

  @parameterized.parameters("rope_parameters", "rope_scaling")
  def test_both_spellings_of_rope(self, name):
    model = _read(**{name: _LLAMA31, "max_position_embeddings": 131072})
    self.assertEqual(model.rope.scaling, "llama3")
    self.assertEqual(model.rope.factor, 8.0)
    self.assertEqual(model.rope.original_length, 8192)
    self.assertEqual(model.rope.theta, 500000.0)
    self.assertEqual(model.max_length, 131072)

  def test_theta_inside_rope_parameters_is_the_one(self):
    rope = {"rope_type": "default", "rope_theta": 123.0}
    model = _read(rope_parameters=rope, rope_theta="absent")
    self.assertEqual((model.rope.theta, model.rope.scaling), (123.0, "none"))

  @parameterized.parameters("linear", "dynamic")
  def test_stretched_rope_reads_longer_texts(self, kind):
    model = _read(rope_scaling={"type": kind, "factor": 4.0})
    self.assertEqual(model.rope.scaling, kind)
    self.assertEqual(model.max_length, 4 * 8192)
    if kind == "dynamic":
      self.assertEqual(model.rope.original_length, 8192)

  @parameterized.parameters(
    ({"architectures": ["GemmaForCausalLM"]}, "Gemma.*'LlamaForCausalLM'"),
    ({"architectures": "absent", "model_type": "gpt2"}, "'gpt2'.*'llama'"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
    (
      {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
      "model.max_length=0 must be",
    ),
    (
      {"layer_types": ["full_attention", "sliding_attention"]},
      r"layer_types=.*must each be in \['full_attention'\]",
    ),
    (
      {
        "architectures": ["Qwen2ForCausalLM"],
        "layer_types": ["sliding_attention"] * 32,
      },
      r"layer_types=.*must each be in \['full_attention'\]",
    ),
    ({"layer_types": ["linear_attention"]}, "layer_types=.*must each be"),
    ({"logit_scale": 0.5}, "unknown key 'logit_scale'=0.5 may change"),
    ({"clip_qkv": 8}, "unknown key 'clip_qkv'=8"),
    ({"is_encoder_decoder": True}, "unknown key 'is_encoder_decoder'=True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*'bits': 4"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
    (
      {"rope_scaling": {"type": "longrope", "factor": 2.0}},
      "rope_scaling.rope_type='longrope' must be one of .*'llama3', 'yarn'",
    ),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor must be given"),
    (
      {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 40}},
      "rope.beta_slow=40.0 must be above 0 and at most rope.beta_fast=32.0",
    ),
    (
      {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}},
      "rope_scaling: unknown entry 'alpha'",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be given"),
    (
      {"rope_scaling": _LLAMA31 | {"low_freq_factor": None}},
      "rope_scaling.low_freq_factor must be given",
    ),
    (
      {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
      "rope_parameters: unknown entry 'full_attention'",
    ),
    ({"num_key_value_heads": 5}, "num_kv_heads=5 must divide .*=32"),
    ({"hidden_size": 4097}, "hidden_size=4097 must be a multiple"),
    ({"vocab_size": "absent"}, "has no entry 'vocab_size'"),
    ({"vocab_size": "many"}, "vocab_size='many' must be 'int'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
    ({"rms_norm_eps": None}, "has no entry 'rms_norm_eps'"),
    ({"moh_jax": {"depth": 3}}, "model.depth"),
    (
      {"moh_jax": {"router": "query_norm"}},
      r"moh_jax\.router\.kind='query_norm'",
    ),
    ({"architectures": ["MoHLlamaForCausalLM"]}, "needs router.kind"),
  )
  def test_other_networks_are_refused_by_field_and_value(self, changes, regex):
    with self.assertRaisesRegex(ValueError, regex):
      _read(**changes)


class FileTest(parameterized.TestCase):
  def _file(self, text: str) -> pathlib.Path:
    path = pathlib.Path(self.create_tempdir().full_path) / "config.json"
    path.write_text(text)
    return path

  def test_errors_name_the_file(self):
    path = self._file(json.dumps(_LLAMA3 | {"hidden_act": "gelu"}))
    with self.assertRaisesRegex(ValueError, "config.json: hidden_act='gelu'"):
      llama_config.read_config(path)

  @parameterized.parameters(
    ("LlamaForCausalLM", "--from moh-llama3"),
    ("MoHLlamaForCausalLM", "--from moh-hf"),
  )
  def test_own_code_names_the_option(self, architecture, option):
    plain = _LLAMA3 | {"architectures": [architecture]}
    mapped = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    path = self._file(json.dumps(plain | {"auto_map": mapped}))
    with self.assertRaisesRegex(ValueError, option):
      llama_config.read_config(path)
    path = self._file(json.dumps(plain))
    (path.parent / "modeling_llama.py").write_text("raise SystemExit")
    with self.assertRaisesRegex(ValueError, option):
      llama_config.read_config(path)

  def test_the_release_may_have_code(self):
    path = self._file(json.dumps(_LLAMA3 | {"auto_map": {"AutoModel": "a.B"}}))
    model = llama_config.read_config(path, "moh-llama3")
    self.assertEqual(model, released_model("llama3-8b"))

  def test_damaged_json_is_named(self):
    with self.assertRaisesRegex(ValueError, "config.json: not valid JSON"):
      llama_config.read_config(self._file('{"hidden_size": '))
    with self.assertRaisesRegex(
      ValueError, "config.json: must be 'object', not array"
    ):
      llama_config.read_config(self._file("[]"))

  def test_missing_file_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nowhere/config.json"):
      llama_config.read_config(pathlib.Path("nowhere/config.json"))


def _all_models():
  models = dict(get_family("llm").released())
  tiny = tiny_llm.MHA
  changes = {
    "tiny_moh": {"model": tiny_llm.MOH},
    "released": {"model": tiny_llm.QUERY_NORM},
    "paper": {
      "model": tiny_llm.MOH,
      "router": RouterConfig(gate_form="paper", two_stage=False),
    },
    "order": {
      "model": tiny_llm.QUERY_NORM,
      "head_order": ((5, 4, 3, 2, 1, 0),) * 3,
      "router": RouterConfig("query_norm", straight_through="all"),
    },
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qwen2": {"qkv_bias": True},
    "out_bias": {"out_bias": True},
    "tied": {"tie_embeddings": True, "norm_eps": 1e-6, "dtype": "bfloat16"},
    "linear": {
      "rope": RotaryConfig(scaling="linear", factor=3.0),
      "max_length": 100,
    },
    "dynamic": {
      "rope": RotaryConfig(scaling="dynamic", factor=2.5, original_length=40),
      "max_length": 100,
    },
    "llama3": {
      "rope": RotaryConfig(
        scaling="llama3", factor=8.0, low_freq_factor=2.0, original_length=32
      ),
    },
    "qwen3": {"qk_norm": True},
    "qwen3_biases": {"qk_norm": True, "qkv_bias": True, "out_bias": True},
    "qwen3_moh": {"model": tiny_llm.QUERY_NORM, "qk_norm": True},
    "yarn": {
      "rope": RotaryConfig(scaling="yarn", factor=4.0, original_length=16),
    },
    "yarn_options": {
      "rope": RotaryConfig(
        scaling="yarn",
        factor=4.0,
        original_length=10,
        beta_fast=8.0,
        beta_slow=0.5,
        truncate=False,
        attention_factor=1.25,
      ),
      "max_length": 100,
    },
    "unused": {"rope": RotaryConfig(factor=2.0, original_length=5)},
  }
  for name, fields in changes.items():
    model = fields.pop("model", tiny)
    models[name] = dataclasses.replace(model, **fields)
  models["heads_by_layer"] = without_router(tiny_llm.MOH, num_heads=(3, 6, 3))
  return models


_MODELS = _all_models()


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(*_MODELS)
  def test_reading_what_was_written_gives_the_model(self, name):
    written = json.loads(json.dumps(llama_config.to_hf(_MODELS[name])))
    self.assertEqual(llama_config.from_hf(written), _MODELS[name])

  @parameterized.parameters(
    ("llama3-8b", "LlamaForCausalLM", "llama"),
    ("biases", "LlamaForCausalLM", "llama"),
    ("unused", "LlamaForCausalLM", "llama"),
    ("linear", "LlamaForCausalLM", "llama"),
    ("qwen2", "Qwen2ForCausalLM", "qwen2"),
    ("qwen3", "Qwen3ForCausalLM", "qwen3"),
    ("qwen3_biases", "Qwen3ForCausalLM", "qwen3"),
    ("qwen3_moh", "MoHLlamaForCausalLM", "moh_llama"),
    ("yarn_options", "LlamaForCausalLM", "llama"),
    ("out_bias", "MoHLlamaForCausalLM", "moh_llama"),
    ("heads_by_layer", "MoHLlamaForCausalLM", "moh_llama"),
    ("moh-llama3-8b", "MoHLlamaForCausalLM", "moh_llama"),
    ("moh-llm-s-75", "MoHLlamaForCausalLM", "moh_llama"),
  )
  def test_only_what_transformers_computes_has_its_name(
    self, name, architecture, model_type
  ):
    written = llama_config.to_hf(_MODELS[name])
    self.assertEqual(written["architectures"], [architecture])
    self.assertEqual(written["model_type"], model_type)

  def test_released_llama_needs_no_key_of_ours(self):
    written = llama_config.to_hf(
      released_model("llama3-8b"), bos_id=128000, eos_id=128001
    )
    self.assertNotIn("moh_jax", written)
    same = {k: v for k, v in _LLAMA3.items() if k != "pretraining_tp"}
    self.assertContainsSubset(same | {"torch_dtype": "float32"}, written)

  def test_our_architecture_has_its_keys(self):
    written = llama_config.to_hf(_MODELS["order"], balance_weight=0.5)
    self.assertEqual(written["router"]["kind"], "query_norm")
    self.assertEqual(written["shared_heads"], (3, 3, 3))
    self.assertEqual(written["selected_heads"], (1, 1, 1))
    self.assertIsNone(written["heads_per_layer"])
    self.assertLen(written["head_order"], 3)
    self.assertEqual(written["router_aux_loss_coef"], 0.5)
    self.assertEqual(written["auto_map"]["AutoModel"], "modeling_moh.MoHModel")
    self.assertNotIn("moh_jax", written)

  def test_heads_of_each_layer(self):
    written = llama_config.to_hf(_MODELS["heads_by_layer"])
    self.assertEqual(written["heads_per_layer"], (3, 6, 3))

  def test_older_exports_with_our_key_alone(self):
    model = _MODELS["order"]
    stored = llama_config.to_hf(without_router(model, head_order=()))
    names = ("router", "shared_heads", "top_k", "head_order")
    fields = dataclasses.asdict(model)
    stored["architectures"] = ["MoHLlamaForCausalLM"]
    stored["moh_jax"] = {name: fields[name] for name in names}
    read = llama_config.from_hf(json.loads(json.dumps(stored)))
    self.assertEqual(read, model)

  def test_heads_must_stand_beside_a_router(self):
    stored = llama_config.to_hf(_MODELS["order"])
    del stored["selected_heads"]
    with self.assertRaisesRegex(ValueError, "no 'selected_heads'"):
      llama_config.from_hf(stored)

  def test_scaling_has_its_name_for_older_versions(self):
    scaling = llama_config.to_hf(_MODELS["llama3"])["rope_scaling"]
    self.assertEqual(scaling["type"], "llama3")
    self.assertEqual(scaling["rope_type"], "llama3")


class ReleasedTest(parameterized.TestCase):
  def test_config_is_that_of_the_plain_llama(self):
    model = released_model("moh-llama3-8b")
    written = llama_config.to_released(model)
    plain = llama_config.to_hf(released_model("llama3-8b"))
    self.assertEqual(written, plain | {"vocab_size": model.vocab_size})
    self.assertEqual(
      llama_config.moh_llama3(llama_config.from_hf(written)), model
    )

  def test_scaling_has_the_keys_that_the_release_reads(self):
    rope = RotaryConfig(scaling="linear", factor=2.0)
    model = dataclasses.replace(_MODELS["released"], rope=rope)
    written = llama_config.to_released(model)
    self.assertEqual(written["rope_scaling"], {"type": "linear", "factor": 2.0})

  @parameterized.parameters(
    ({"router": RouterConfig()}, "router.kind='two_stage' must be"),
    (
      {"router": RouterConfig("query_norm", top_p=0.5)},
      "router.top_p=0.5 must be 0.0",
    ),
    ({"shared_heads": (3, 3, 2)}, r"shared_heads=.* must be \(3, 3, 3\)"),
    ({"top_k": (2, 1, 1)}, r"top_k=.* must be \(1, 1, 1\)"),
    ({"head_order": ((1, 0, 2, 3, 4, 5),) * 3}, "head_order=.*must be"),
    ({"head_dim": 6}, "head_dim=6 must be 4"),
    ({"mlp_bias": True}, "mlp_bias=True must be False"),
    ({"qkv_bias": True}, "it is a Qwen2ForCausalLM"),
    ({"out_bias": True}, "it is a MoHLlamaForCausalLM"),
    ({"rope": RotaryConfig(scaling="llama3")}, "scaling='llama3' must be one"),
    (
      {"num_heads": (9,) * 3, "shared_heads": (4,) * 3, "top_k": (2,) * 3},
      "num_heads=.* must be even",
    ),
    (
      {"num_heads": (6, 9, 6), "router": RouterConfig()},
      "router.kind=.*; model.num_heads=",
    ),
  )
  def test_other_forms_are_refused_by_field(self, changes, regex):
    model = dataclasses.replace(_MODELS["released"], **changes)
    with self.assertRaisesRegex(ValueError, f"--to released: .*{regex}"):
      llama_config.to_released(model)


if __name__ == "__main__":
  absltest.main()
