import dataclasses
import json
import math

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import LLMConfig, RouterConfig, without_router
from moh_jax.config.heads import HeadBudget
from tests.training import tiny

_TINY = tiny.LLM
_OUT_OF_RANGE = (
  ("family", "dit", "('llm',)"),
  ("router", "none", "a RouterConfig"),
  ("rope", None, "a RotaryConfig"),
  ("dtype", "float64", "('float32', 'bfloat16')"),
  ("remat", "some", "('none', 'full', 'attention',"),
  ("attention_impl", "flash", "'dense'"),
  ("vocab_size", 0, "at least 1"),
  ("max_length", 0, "at least 1"),
  ("width", 0, "at least 1"),
  ("mlp_dim", 0, "at least 1"),
  ("num_kv_heads", 0, "at least 1"),
  ("num_kv_heads", 3, "divide model.num_heads[0]=4"),
  ("head_dim", 0, "even"),
  ("head_dim", 7, "even"),
  ("head_dim", -2, "even"),
  ("norm_eps", 0.0, "[1e-12, 1.0]"),
  ("norm_eps", math.nan, "[1e-12, 1.0]"),
  ("loss_chunk", -1, "at least 0"),
  ("num_heads", (), "at least one layer"),
  ("shared_heads", (1,), "one value per layer"),
  ("top_k", (2, 2, 2), "model.num_heads=(4, 4) has (2)"),
)


def _config(**changes) -> LLMConfig:
  return dataclasses.replace(_TINY, **changes)


class LLMConfigTest(parameterized.TestCase):
  @parameterized.parameters(*_OUT_OF_RANGE)
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      _config(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"model.{field}={value!r} must ")
    self.assertIn(allowed, message)

  @parameterized.named_parameters(
    ("more_routed_than_left", {"top_k": (2, 4)}, r"1: top_k=4 .*\[0, 3\]"),
    ("too_many_shared", {"shared_heads": (5, 1)}, r"0: shared=5 .*\[0, 4\]"),
    (
      "no_head_active",
      {"shared_heads": (1, 0), "top_k": (2, 0)},
      "1: .*no head active",
    ),
  )
  def test_budget_that_does_not_add_up_names_its_layer(self, changes, message):
    with self.assertRaisesRegex(ValueError, f"^model, layer {message}"):
      _config(**changes)

  def test_kv_heads_divide_the_heads_of_every_layer(self):
    with self.assertRaisesRegex(
      ValueError, r"num_kv_heads=2 must divide model\.num_heads\[1\]=5"
    ):
      _config(num_heads=(4, 5))

  @parameterized.parameters(
    (((0, 1, 2, 3),), r"model\.head_order has 1 rows, .* layer \(2\)"),
    (
      ((0, 1, 2, 3), (0, 1, 2, 2)),
      r"model\.head_order\[1\]=\(0, 1, 2, 2\) must hold each of the 4 heads",
    ),
    (((0, 1, 2), (0, 1, 2, 3)), r"model\.head_order\[0\]=\(0, 1, 2\) must"),
    (((1, 2, 3, 4), (0, 1, 2, 3)), r"model\.head_order\[0\]=\(1, 2, 3, 4\)"),
  )
  def test_order_of_heads_has_each_head_of_each_layer(self, order, message):
    with self.assertRaisesRegex(ValueError, message):
      _config(head_order=order)

  @parameterized.parameters(
    ("head_dim", 2),
    ("loss_chunk", 0),
    ("num_kv_heads", 1),
    ("num_kv_heads", 4),
    ("norm_eps", 1.0),
    ("head_order", ((3, 2, 1, 0), (0, 1, 2, 3))),
  )
  def test_range_includes_its_last_value(self, field, value):
    self.assertEqual(getattr(_config(**{field: value}), field), value)

  def test_budgets_split_every_layer(self):
    config = _config(shared_heads=(1, 4), top_k=(2, 0))
    self.assertEqual(
      config.budgets(), (HeadBudget(4, 1, 2, 8), HeadBudget(4, 4, 0, 8))
    )
    self.assertEqual([group.depth for group in config.layer_groups()], [1, 1])
    self.assertEqual([group.depth for group in _TINY.layer_groups()], [2])

  def test_runtime_fields_exist(self):
    names = {field.name for field in dataclasses.fields(LLMConfig)}
    self.assertContainsSubset(LLMConfig.RUNTIME_FIELDS, names)

  def test_without_router_changes_the_kind_of_the_router_only(self):
    config = without_router(_TINY)
    self.assertEqual(config.router.kind, "none")
    back = dataclasses.replace(config, router=RouterConfig("two_stage"))
    self.assertEqual(back, _TINY)


class RunTest(parameterized.TestCase):
  """A whole run of a language model."""

  def test_json_gives_the_same_run_back(self):
    config = tiny.llm_config(
      model={"head_order": ((3, 2, 1, 0), (0, 1, 2, 3))},
      data={
        "source": "tokens",
        "path": "somewhere",
        "mix": ("web", "code"),
        "ratios": (66.7, 33.3),
      },
      tune={"top_k_steps": (0, 3), "top_k_values": (3, 2)},
    )
    text = config_lib.to_json(config)
    self.assertEqual(config_lib.from_config_dict(json.loads(text)), config)

  def test_config_dict_gives_the_same_run_back(self):
    config = tiny.llm_config()
    cfg = config_lib.to_config_dict(config)
    self.assertEqual(config_lib.from_config_dict(cfg), config)
    self.assertNotIn("diffusion", cfg)
    cfg.model.top_k = (3, 3)
    changed = config_lib.from_config_dict(cfg)
    self.assertEqual(changed.model.top_k, (3, 3))

  @parameterized.parameters(
    ("model", {"head_orders": ()}, "unknown config key model.head_orders"),
    ("model", {"head_order": ((0, "1"),)}, "model.head_order[0][1]='1' must"),
    ("model", {"tie_embeddings": 1}, "model.tie_embeddings=1 must be of type"),
    ("data", {"ratios": ("1",)}, "data.ratios[0]='1' must be of type float"),
    ("data", {"augment": "none"}, "unknown config key data.augment"),
    (
      "model",
      {"rope": {"base": 5.0}},
      "unknown config key model.rope.base; known: ['attention_factor', ",
    ),
    (
      "model",
      {"rope": {"theta": "5"}},
      "model.rope.theta='5' must be of type float",
    ),
    (
      "model",
      {"rope": {"scaling": "su"}},
      "model.rope.scaling='su' must be one of ('none', 'linear',",
    ),
    (
      "model",
      {"rope": {"low_freq_factor": 9.0}},
      "model.rope.low_freq_factor=9.0 must be above 0 and below",
    ),
    ("tune", {"top_k_steps": 0}, "tune.top_k_steps=0 must be"),
  )
  def test_unknown_keys_and_types_are_named(self, section, fields, message):
    with self.assertRaises(ValueError) as caught:
      config_lib.apply_overrides(tiny.llm_config(), section, **fields)
    self.assertIn(message, str(caught.exception))

  def test_sections_are_those_of_the_family(self):
    with self.assertRaisesRegex(
      ValueError, "'tune' must be a TuneConfig for .*'llm', not a NoneType"
    ):
      dataclasses.replace(tiny.llm_config(), tune=None)
    with self.assertRaisesRegex(
      ValueError, "unknown config section 'tune' for .*'vit'"
    ):
      dataclasses.replace(tiny.config(), tune=config_lib.TuneConfig())
    with self.assertRaisesRegex(ValueError, "unknown config section 'diff"):
      dataclasses.replace(
        tiny.llm_config(), diffusion=config_lib.DiffusionConfig()
      )

  def test_data_section_is_that_of_the_family(self):
    with self.assertRaisesRegex(
      ValueError, "'data' must be a TextDataConfig .*'llm', not a DataConfig"
    ):
      dataclasses.replace(tiny.llm_config(), data=config_lib.DataConfig())

  def test_sequences_fit_the_models_range(self):
    with self.assertRaisesRegex(
      ValueError, r"data\.sequence_length=33 must be at most .*max_length=32"
    ):
      tiny.llm_config(data={"sequence_length": 33})
    tiny.llm_config(data={"sequence_length": 32})

  @parameterized.parameters(
    (
      {"tune": {"top_k_steps": (0, 2), "top_k_values": (3, 1)}},
      r"tune\.top_k_values=\(3, 1\) must end with the model\.top_k .*\(2,\)",
    ),
    (
      {"tune": {"top_k_steps": (0, 2), "top_k_values": (4, 2)}},
      r"tune\.top_k_values=\(4, 2\) must be at most the 3 routed heads",
    ),
    (
      {
        "model": {"top_k": (2, 3)},
        "tune": {"top_k_steps": (0,), "top_k_values": (2,)},
      },
      r"must end with the model\.top_k of the layers that route, \(2, 3\)",
    ),
    (
      {
        "model": {"router": RouterConfig("none")},
        "tune": {"top_k_steps": (0,), "top_k_values": (2,)},
      },
      r"must end with the model\.top_k of the layers that route, \(\)",
    ),
  )
  def test_schedule_must_fit_the_model(self, sections, message):
    with self.assertRaisesRegex(ValueError, message):
      tiny.llm_config(**sections)

  def test_schedule_ignores_layers_that_route_nothing(self):
    config = tiny.llm_config(
      model={"shared_heads": (4, 1), "top_k": (0, 2)},
      tune={"top_k_steps": (0, 2), "top_k_values": (3, 2)},
    )
    self.assertEqual(config.tune.top_k_values, (3, 2))


if __name__ == "__main__":
  absltest.main()
