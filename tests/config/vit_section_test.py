import dataclasses

from absl.testing import absltest, parameterized

from moh_jax.config import (
  Config,
  RouterConfig,
  StageShape,
  ViTConfig,
  families,
  imported,
)

_TINY = ViTConfig(
  image_size=(16, 8),
  patch_stride=2,
  embed_dims=(8, 12),
  depths=(1, 2),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
)
_OUT_OF_RANGE = (
  ("family", "llm", "('vit',)"),
  ("router", "none", "a RouterConfig"),
  ("dtype", "float64", "('float32', 'bfloat16')"),
  ("remat", "some", "('none', 'full', 'attention',"),
  ("attention_impl", "flash", "'dense'"),
  ("attention_impl", "kernel", "add no position bias"),
  ("channels", 0, "at least 1"),
  ("num_classes", 0, "at least 1"),
  ("patch_stride", 0, "at least 1"),
  ("fixed_pool_size", -1, "at least 0"),
  ("pretrain_image_size", -1, "at least 0"),
  ("pretrain_columns", -1, "at least 0"),
  ("drop_path", 1.0, "[0, 0.999]"),
  ("drop_path", -0.1, "[0, 0.999]"),
  ("image_size", (8,), "(rows, columns)"),
  ("image_size", (8, 0), "(rows, columns)"),
  ("window", 2, "odd"),
  ("window", -1, "odd"),
  ("embed_dims", (8, 0), "at least 1 everywhere"),
  ("depths", (1, 0), "at least 1 everywhere"),
  ("num_heads", (2, 0), "at least 1 everywhere"),
  ("sr_ratios", (0, 1), "at least 1 everywhere"),
)
_PER_STAGE = (
  "embed_dims",
  "num_heads",
  "shared_heads",
  "top_k",
  "mlp_ratios",
  "sr_ratios",
)


class ViTConfigTest(parameterized.TestCase):
  @parameterized.parameters(*_OUT_OF_RANGE)
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      dataclasses.replace(_TINY, **{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"model.{field}={value!r} must be ")
    self.assertIn(allowed, message)

  @parameterized.parameters(*_PER_STAGE)
  def test_every_tuple_has_one_value_per_stage(self, field):
    values = getattr(_TINY, field)[:1]
    with self.assertRaises(ValueError) as caught:
      dataclasses.replace(_TINY, **{field: values})
    message = str(caught.exception)
    self.assertStartsWith(message, f"model.{field}={values} must have one")
    self.assertIn("model.depths=(1, 2)", message)

  def test_a_model_has_a_stage(self):
    with self.assertRaisesRegex(ValueError, r"model\.depths=\(\) must"):
      dataclasses.replace(_TINY, depths=())

  def test_width_is_a_multiple_of_the_heads(self):
    with self.assertRaisesRegex(
      ValueError, r"model\.embed_dims\[1\]=10 must .*model\.num_heads\[1\]=4"
    ):
      dataclasses.replace(_TINY, embed_dims=(8, 10))

  def test_mlp_has_a_column(self):
    with self.assertRaisesRegex(ValueError, r"model\.mlp_ratios\[1\]=0"):
      dataclasses.replace(_TINY, mlp_ratios=(2, 0))

  @parameterized.named_parameters(
    ("more_routed_than_left", {"top_k": (1, 3)}, "stage 2: top_k=3 .*0, 2"),
    ("negative_top_k", {"top_k": (-1, 1)}, "stage 1: top_k=-1 must be in"),
    ("too_many_shared", {"shared_heads": (3, 2)}, "stage 1: shared=3 .*0, 2"),
    (
      "no_head_active",
      {"shared_heads": (0, 2), "top_k": (0, 1)},
      "stage 1: .*no head active",
    ),
  )
  def test_head_budget_adds_up(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(_TINY, **changes)

  @parameterized.parameters(
    ((2, 4), (0, 0)), ((0, 0), (2, 4)), ((1, 1), (1, 3))
  )
  def test_extreme_budgets_are_legal(self, shared, top_k):
    config = dataclasses.replace(_TINY, shared_heads=shared, top_k=top_k)
    active = [budget.active for budget in config.budgets()]
    self.assertEqual(active, [s + k for s, k in zip(shared, top_k)])

  def test_budgets_split_every_stage(self):
    first, second = _TINY.budgets()
    self.assertEqual((first.routed, first.active, first.head_dim), (1, 2, 4))
    self.assertEqual((second.routed, second.active, second.head_dim), (2, 3, 3))

  def test_without_router_all_heads_are_shared(self):
    config = dataclasses.replace(_TINY, router=RouterConfig("none"))
    for budget, ours in zip(config.budgets(), _TINY.budgets(), strict=True):
      self.assertEqual(budget.shared, ours.num_heads)
      self.assertEqual((budget.top_k, budget.head_dim), (0, ours.head_dim))
    self.assertEqual(config.activated_share, 1.0)

  def test_activated_share_counts_the_blocks_of_every_stage(self):
    self.assertEqual(_TINY.activated_share, (2 + 2 * 3) / (2 + 2 * 4))

  def test_router_of_language_models_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, r"model\.router\.kind='query_norm' must be .*'two_stage'"
    ):
      dataclasses.replace(_TINY, router=RouterConfig("query_norm"))

  def test_stage_shapes_halve_the_grid(self):
    first, second = _TINY.stage_shapes()
    self.assertEqual(first, StageShape((8, 4), (4, 2), (8, 4)))
    self.assertEqual(second, StageShape((4, 2), None, (4, 2)))

  def test_odd_sizes_round_up(self):
    config = dataclasses.replace(_TINY, image_size=(15, 9))
    grids = [shape.grid for shape in config.stage_shapes()]
    self.assertEqual(grids, [(8, 5), (4, 3)])

  def test_pretrain_grid_is_of_the_pretraining_size(self):
    config = dataclasses.replace(_TINY, pretrain_image_size=32)
    grids = [shape.pretrain_grid for shape in config.stage_shapes()]
    self.assertEqual(grids, [(16, 16), (8, 8)])

  @parameterized.parameters(
    ((32, 16), {}, (48, 48)), ((16, 32), {}, (32, 16)),
    ((24, 24), {"pretrain_image_size": 32}, (16, 16)),
    ((16, 32), {"pretrain_image_size": 32, "pretrain_columns": 16}, (16, 16)),
  )  # fmt: skip
  def test_other_sizes_keep_the_coordinates_of_both_sides(
    self, size, pretrain, other
  ):
    config = dataclasses.replace(_TINY, image_size=size, **pretrain)
    expected = [shape.pretrain_grid for shape in config.stage_shapes()]
    trained = Config(model=config)
    found = config.inherited(trained, {"image_size": other})["model"]
    finer = dataclasses.replace(
      config,
      image_size=other,
      **{k: v for k, v in found.items() if k.startswith("pretrain")},
    )
    converted = config.resized(trained, other[0]).model
    for model in (finer, converted):
      grids = [shape.pretrain_grid for shape in model.stage_shapes()]
      self.assertEqual(grids, expected)

  def test_fixed_pool_size_replaces_the_ratio(self):
    config = dataclasses.replace(_TINY, fixed_pool_size=3)
    pools = [shape.pool_grid for shape in config.stage_shapes()]
    self.assertEqual(pools, [(3, 3), None])

  def test_image_too_small_for_a_stage_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, r"model\.image_size=\(16, 2\) is too small for stage 1"
    ):
      dataclasses.replace(_TINY, image_size=(16, 2))

  def test_pool_larger_than_the_grid_is_refused(self):
    with self.assertRaisesRegex(ValueError, r"model\.fixed_pool_size=5\)"):
      dataclasses.replace(_TINY, fixed_pool_size=5)

  def test_mlp_width_is_two_thirds_of_the_ratio(self):
    self.assertEqual(_TINY.mlp_dims, (2 * 16 // 3, 2 * 24 // 3))

  def test_runtime_fields_exist(self):
    names = {field.name for field in dataclasses.fields(ViTConfig)}
    self.assertContainsSubset(ViTConfig.RUNTIME_FIELDS, names)

  def test_family_is_registered(self):
    for family in families():
      self.assertEqual(imported(family.model)().family, family.name)


if __name__ == "__main__":
  absltest.main()
