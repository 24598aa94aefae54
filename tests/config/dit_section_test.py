import dataclasses

from absl.testing import absltest, parameterized

from moh_jax.config import (
  Config,
  DiTConfig,
  LayerGroup,
  SampleConfig,
  without_router,
)
from moh_jax.config.heads import HeadBudget, RouterConfig

_TINY = DiTConfig(
  input_size=(4, 6),
  channels=3,
  num_classes=5,
  width=8,
  num_heads=(4, 4, 6),
  head_dim=4,
  shared_heads=(2, 2, 6),
  top_k=(1, 1, 0),
)
_OUT_OF_RANGE = (
  ("family", "vit", "('dit',)"),
  ("router", "none", "a RouterConfig"),
  ("dtype", "float64", "('float32', 'bfloat16')"),
  ("remat", "some", "('none', 'full', 'attention',"),
  ("attention_impl", "flash", "'dense'"),
  ("channels", 0, "at least 1"),
  ("num_classes", 0, "at least 1"),
  ("patch_size", 0, "at least 1"),
  ("head_dim", 0, "at least 1"),
  ("label_dropout", -0.1, "[0, 0.999]"),
  ("label_dropout", 1.0, "[0, 0.999]"),
  ("width", 6, "multiple of 4"),
  ("width", 0, "multiple of 4"),
  ("width", -4, "multiple of 4"),
  ("input_size", (4, 5), "multiples of model.patch_size=2"),
  ("input_size", (0, 4), "multiples of model.patch_size=2"),
  ("num_heads", (), "at least one layer"),
  ("shared_heads", (2, 2), "one value per layer"),
  ("shared_heads", (2, 2, 6, 6), "model.num_heads=(4, 4, 6) has (3)"),
  ("top_k", (1,), "one value per layer"),
)


def _config(**changes) -> DiTConfig:
  return dataclasses.replace(_TINY, **changes)


class DiTConfigTest(parameterized.TestCase):
  @parameterized.parameters(*_OUT_OF_RANGE)
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      _config(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"model.{field}={value!r} must ")
    self.assertIn(allowed, message)

  @parameterized.parameters(0.0, 0.1, -1.0)
  def test_mlp_has_a_column(self, ratio):
    with self.assertRaisesRegex(
      ValueError, rf"model\.mlp_ratio={ratio} leaves no .* at width 8"
    ):
      _config(mlp_ratio=ratio)

  @parameterized.named_parameters(
    ("more_routed_than_left", {"top_k": (1, 3, 0)}, r"1: top_k=3 .*\[0, 2\]"),
    ("negative_top_k", {"top_k": (-1, 1, 0)}, "0: top_k=-1 must be in"),
    ("too_many_shared", {"shared_heads": (2, 2, 7)}, r"2: shared=7 .*\[0, 6\]"),
    ("no_head", {"num_heads": (4, 0, 6)}, "1: num_heads=0 must be at least 1"),
    (
      "no_head_active",
      {"shared_heads": (2, 0, 6), "top_k": (1, 0, 0)},
      "1: .*no head active",
    ),
  )
  def test_budget_that_does_not_add_up_names_its_layer(self, changes, message):
    with self.assertRaisesRegex(ValueError, f"^model, layer {message}"):
      _config(**changes)

  @parameterized.parameters(
    ("label_dropout", 0.0), ("label_dropout", 0.999), ("width", 4)
  )
  def test_range_includes_its_last_value(self, field, value):
    self.assertEqual(getattr(_config(**{field: value}), field), value)

  def test_budgets_split_every_layer(self):
    self.assertEqual(
      _TINY.budgets(),
      (HeadBudget(4, 2, 1, 4), HeadBudget(4, 2, 1, 4), HeadBudget(6, 6, 0, 4)),
    )

  def test_derived_sizes(self):
    self.assertEqual(_TINY.depth, 3)
    self.assertEqual(_TINY.input_shape, (4, 6, 3))
    self.assertEqual(_TINY.grid, (2, 3))
    self.assertEqual(_config(patch_size=1).grid, (4, 6))
    self.assertEqual(_TINY.mlp_dim, 32)
    self.assertEqual(_config(mlp_ratio=1.4).mlp_dim, 11)

  @parameterized.parameters((True, 6), (False, 3))
  def test_learned_variance_doubles_the_output(self, learn_sigma, channels):
    config = _config(learn_sigma=learn_sigma)
    self.assertEqual(config.out_channels, channels)

  def test_runtime_fields_exist(self):
    names = {field.name for field in dataclasses.fields(DiTConfig)}
    self.assertContainsSubset(DiTConfig.RUNTIME_FIELDS, names)


class LayerGroupsTest(absltest.TestCase):
  def test_equal_neighbours_are_one_group(self):
    self.assertEqual(
      _TINY.layer_groups(),
      (
        LayerGroup(HeadBudget(4, 2, 1, 4), 2, 8, 6),
        LayerGroup(HeadBudget(6, 6, 0, 4), 1, 8, 6),
      ),
    )

  def test_equal_layers_apart_are_two_groups(self):
    config = _config(
      num_heads=(4, 6, 4), shared_heads=(2, 6, 2), top_k=(1, 0, 1)
    )
    self.assertEqual(
      [group.depth for group in config.layer_groups()], [1, 1, 1]
    )

  def test_any_part_of_the_split_divides(self):
    for changes in (
      {"num_heads": (4, 5), "shared_heads": (2, 2), "top_k": (1, 1)},
      {"num_heads": (4, 4), "shared_heads": (2, 1), "top_k": (1, 1)},
      {"num_heads": (4, 4), "shared_heads": (2, 2), "top_k": (1, 2)},
    ):
      self.assertLen(_config(**changes).layer_groups(), 2)

  def test_activated_share_counts_all_heads(self):
    self.assertEqual(_TINY.activated_share, (3 + 3 + 6) / (4 + 4 + 6))

  def test_default_is_the_small_model(self):
    self.assertEqual(
      [group.depth for group in DiTConfig().layer_groups()], [8, 4]
    )


class InheritedTest(absltest.TestCase):
  def test_what_belongs_to_the_old_data_stays_there(self):
    sample = SampleConfig(
      steps="5",
      cfg_scale=3.0,
      labels=(4, 2),
      fid_images=50,
      fid_reference="pets.npz",
      fid_inception="inception.pth",
    )
    trained = Config(model=_TINY, sample=sample)
    found = _TINY.inherited(trained, {})["sample"]
    expected = SampleConfig(
      steps="5", cfg_scale=3.0, fid_inception="inception.pth"
    )
    self.assertEqual(found, dataclasses.asdict(expected))


class WithoutRouterTest(absltest.TestCase):
  def test_changes_the_kind_of_the_router_only(self):
    config = without_router(_TINY)
    self.assertEqual(config.router.kind, "none")
    back = dataclasses.replace(config, router=RouterConfig("two_stage"))
    self.assertEqual(back, _TINY)

  def test_all_heads_are_shared_whatever_the_section_says(self):
    config = without_router(_TINY, shared_heads=(9, 0, 1), top_k=(1, 0, 7))
    expected = tuple(HeadBudget(h, h, 0, 4) for h in (4, 4, 6))
    self.assertEqual(config.budgets(), expected)
    self.assertEqual(config.activated_share, 1.0)

  def test_keeps_the_groups_of_layers(self):
    config = _config(num_heads=(4, 4, 4), shared_heads=(2, 1, 1))
    self.assertEqual(
      [group.depth for group in without_router(config).layer_groups()],
      [group.depth for group in config.layer_groups()],
    )


if __name__ == "__main__":
  absltest.main()
