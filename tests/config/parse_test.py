import dataclasses
import json
import re

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib

_MODEL = config_lib.ViTConfig(
  image_size=(8, 8),
  patch_stride=4,
  embed_dims=(8,),
  depths=(1,),
  num_heads=(4,),
  shared_heads=(1,),
  top_k=(1,),
  mlp_ratios=(2.0,),
  sr_ratios=(1,),
)
_CONFIG = config_lib.Config(
  model=_MODEL,
  data=config_lib.DataConfig(batch_size=12),
  optim=config_lib.OptimConfig(lr=3e-4, no_decay=("*/bias", "*/scale")),
  checkpoint=config_lib.CheckpointConfig(async_save=False),
)
_SECTIONS = (
  "model",
  "data",
  "optim",
  "train",
  "mesh",
  "checkpoint",
  "eval",
  "log",
  "classifier",
)


def _changed(section, **fields):
  cfg = config_lib.to_config_dict(_CONFIG).to_dict()
  cfg[section] = {**cfg[section], **fields}
  return cfg


class FromConfigDictTest(parameterized.TestCase):
  def test_round_trips(self):
    cfg = config_lib.to_config_dict(_CONFIG)
    self.assertEqual(config_lib.from_config_dict(cfg), _CONFIG)

  def test_missing_sections_take_their_defaults(self):
    config = config_lib.from_config_dict({"model": dataclasses.asdict(_MODEL)})
    self.assertEqual(config, config_lib.Config(model=_MODEL))

  def test_unknown_section_lists_the_known(self):
    cfg = {**config_lib.to_config_dict(_CONFIG).to_dict(), "optimizer": {}}
    with self.assertRaisesRegex(
      ValueError, "'optimizer' for .*; known: .*'optim'"
    ):
      config_lib.from_config_dict(cfg)

  @parameterized.parameters(*_SECTIONS)
  def test_unknown_key_lists_the_known(self, section):
    with self.assertRaises(ValueError) as caught:
      config_lib.from_config_dict(_changed(section, nope=1))
    message = str(caught.exception)
    self.assertIn(f"unknown config key {section}.nope", message)
    first = dataclasses.fields(getattr(_CONFIG, section))[0].name
    self.assertIn(repr(first), message)

  @parameterized.parameters("nope", "optim.nope", "model.nope")
  def test_locked_dict_refuses_an_unknown_key(self, path):
    cfg = config_lib.to_config_dict(_CONFIG)
    with self.assertRaises(KeyError):
      cfg.update_from_flattened_dict({path: 1})

  def test_locked_dict_refuses_an_unknown_attribute(self):
    cfg = config_lib.to_config_dict(_CONFIG)
    with self.assertRaisesRegex(AttributeError, "learning_rate"):
      cfg.optim.learning_rate = 1e-3

  def test_model_is_required(self):
    with self.assertRaisesRegex(ValueError, "no section 'model'"):
      config_lib.from_config_dict({"data": {}})

  @parameterized.parameters("resnet", None)
  def test_unknown_family_lists_the_known(self, family):
    with self.assertRaisesRegex(
      ValueError, r"model\.family=.*\('vit', 'dit', 'llm'"
    ):
      config_lib.from_config_dict(_changed("model", family=family))

  @parameterized.parameters(
    ("data", "batch_size", 8.0, "int"),
    ("data", "batch_size", True, "int"),
    ("data", "path", 7, "str"),
    ("data", "mean", 0.5, "tuple"),
    ("optim", "lr", "1e-3", "float"),
    ("optim", "lr", None, "float"),
    ("optim", "lr", True, "float"),
    ("optim", "no_decay", "*/bias", "tuple"),
    ("train", "steps", "10", "int"),
    ("checkpoint", "async_save", 1, "bool"),
    ("model", "depths", 1, "tuple"),
  )
  def test_wrong_type_names_field_value_and_type(
    self, section, field, value, kind
  ):
    with self.assertRaises(ValueError) as caught:
      config_lib.from_config_dict(_changed(section, **{field: value}))
    message = str(caught.exception)
    self.assertStartsWith(message, f"{section}.{field}={value!r} must be ")
    self.assertIn(kind, message)

  def test_wrong_type_inside_a_tuple_names_its_place(self):
    with self.assertRaisesRegex(ValueError, r"data\.mean\[1\]='x' must be"):
      config_lib.from_config_dict(_changed("data", mean=(0.1, "x", 0.3)))

  def test_pair_has_two_values(self):
    with self.assertRaisesRegex(ValueError, r"model\.image_size=.* 2 values"):
      config_lib.from_config_dict(_changed("model", image_size=(8, 8, 3)))

  @parameterized.parameters("model", "data", "log")
  def test_section_that_is_no_mapping_is_refused_by_name(self, section):
    cfg = {**config_lib.to_config_dict(_CONFIG).to_dict(), section: 3}
    with self.assertRaisesRegex(ValueError, section):
      config_lib.from_config_dict(cfg)

  def test_family_of_a_wrong_type_is_refused_by_name(self):
    with self.assertRaisesRegex(ValueError, r"model\.family=\['vit'\]"):
      config_lib.from_config_dict(_changed("model", family=["vit"]))

  @parameterized.parameters(
    (
      {"kinds": "none"},
      "unknown config key model.router.kinds; did you mean 'kind'?; known:",
    ),
    ({"two_stage": "yes"}, "model.router.two_stage='yes' must be of type bool"),
    ({"kind": "one"}, "model.router.kind='one' must be one of ('two_stage', "),
    ({"gate_form": "x"}, "model.router.gate_form='x' must be one of ('rel"),
    (3, "model.router=3 must be a section with the fields ['kind', "),
  )
  def test_nested_section_is_named_with_its_whole_path(self, router, message):
    with self.assertRaises(ValueError) as caught:
      config_lib.from_config_dict(_changed("model", router=router))
    self.assertStartsWith(str(caught.exception), message)

  @parameterized.parameters(
    ("model", "gate_form", "paper", "model.router.gate_form"),
    ("model", "router", "none", "model.router.kind"),
    ("train", "mixup", 0.2, "classifier.mixup"),
  )
  def test_older_key_is_refused_with_the_present_one(
    self, section, key, value, present
  ):
    with self.assertRaisesRegex(
      ValueError, rf"(now|looks like) {re.escape(present)}$"
    ):
      config_lib.from_config_dict(_changed(section, **{key: value}))

  def test_unset_leaves_are_none_and_can_be_set(self):
    cfg = config_lib.to_config_dict(_CONFIG)
    self.assertIsNone(cfg.model.num_classes)
    unset = config_lib.from_config_dict(cfg)
    self.assertIsNone(unset.model.num_classes)
    cfg.model.num_classes = 7
    cfg.data.mean = cfg.data.std = (0.5,) * 3
    config = config_lib.from_config_dict(cfg)
    self.assertEqual(config.model.num_classes, 7)
    with self.assertRaises(TypeError):
      cfg.model.num_classes = "many"

  @parameterized.parameters(("many", "int"), (True, "int"))
  def test_wrong_type_of_an_unset_leaf_is_named(self, value, kind):
    with self.assertRaisesRegex(
      ValueError, rf"model\.num_classes={value!r} must be of type {kind}"
    ):
      config_lib.from_config_dict(_changed("model", num_classes=value))

  def test_lists_become_tuples(self):
    cfg = _changed("model", image_size=[8, 8], depths=[1])
    config = config_lib.from_config_dict(cfg)
    self.assertEqual(config.model.image_size, (8, 8))
    self.assertEqual(config.model.depths, (1,))

  def test_integers_become_floats(self):
    cfg = _changed("optim", lr=1)
    cfg["model"]["mlp_ratios"] = (2,)
    config = config_lib.from_config_dict(cfg)
    self.assertIsInstance(config.optim.lr, float)
    self.assertIsInstance(config.model.mlp_ratios[0], float)


class JsonTest(absltest.TestCase):
  def test_round_trips(self):
    self.assertEqual(
      config_lib.from_config_dict(json.loads(config_lib.to_json(_CONFIG))),
      _CONFIG,
    )

  def test_holds_every_section(self):
    stored = json.loads(config_lib.to_json(_CONFIG))
    self.assertCountEqual(stored, _SECTIONS)
    self.assertEqual(stored["model"]["router"]["kind"], "two_stage")
    self.assertEqual(stored["optim"]["lr"], 3e-4)


class CrossChecksTest(absltest.TestCase):
  def test_batch_is_a_multiple_of_the_accumulation(self):
    with self.assertRaisesRegex(
      ValueError, r"data\.batch_size=12 .*optim\.accumulation=5"
    ):
      config_lib.apply_overrides(_CONFIG, "optim", accumulation=5)

  def test_warmup_fits_the_run(self):
    with self.assertRaisesRegex(
      ValueError, r"optim\.warmup_steps=1001 .*train\.steps=1000"
    ):
      config_lib.apply_overrides(_CONFIG, "optim", warmup_steps=1001)

  def test_mean_has_one_value_per_channel(self):
    with self.assertRaisesRegex(ValueError, r"data\.mean=.*channels=1"):
      dataclasses.replace(
        _CONFIG,
        model=dataclasses.replace(_MODEL, channels=1),
        data=config_lib.DataConfig(mean=(0.1,) * 3, std=(0.2,) * 3),
      )


class ApplyOverridesTest(absltest.TestCase):
  def test_changes_only_the_named_field(self):
    changed = config_lib.apply_overrides(_CONFIG, "model", top_k=(2,))
    self.assertEqual(changed.model.top_k, (2,))
    self.assertEqual(
      config_lib.apply_overrides(changed, "model", top_k=(1,)), _CONFIG
    )

  def test_nested_section_keeps_its_other_fields(self):
    router = {"two_stage": False}
    changed = config_lib.apply_overrides(_CONFIG, "model", router=router)
    changed = config_lib.apply_overrides(
      changed, "model", router={"gate_form": "paper"}
    )
    self.assertEqual(
      changed.model.router,
      config_lib.RouterConfig(gate_form="paper", two_stage=False),
    )

  def test_checks_again(self):
    with self.assertRaisesRegex(ValueError, "top_k=4"):
      config_lib.apply_overrides(_CONFIG, "model", top_k=(4,))


class DifferingFieldsTest(absltest.TestCase):
  def test_names_the_fields_and_both_values(self):
    ours = dataclasses.replace(_MODEL, num_classes=1000)
    theirs = dataclasses.replace(_MODEL, top_k=(3,), num_classes=5)
    lines = config_lib.differing_fields(ours, theirs, "model")
    self.assertEqual(
      lines,
      [
        "model.num_classes: 1000 here, 5 there",
        "model.top_k: (1,) here, (3,) there",
      ],
    )

  def test_names_fields_of_nested_sections(self):
    router = config_lib.RouterConfig("none")
    theirs = dataclasses.replace(_MODEL, router=router)
    self.assertEqual(
      config_lib.differing_fields(_MODEL, theirs, "model"),
      ["model.router.kind: 'two_stage' here, 'none' there"],
    )

  def test_equal_sections_differ_in_nothing(self):
    same = dataclasses.replace(_MODEL)
    self.assertEmpty(config_lib.differing_fields(_MODEL, same, "model"))


if __name__ == "__main__":
  absltest.main()
