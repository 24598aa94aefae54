"""What model sections tell of their layers and leave to other runs."""

import dataclasses

from absl.testing import absltest, parameterized

from moh_jax.config import (
  Config,
  DiTConfig,
  HeadBudget,
  LayerGroup,
  RouterConfig,
  SampleConfig,
  without_router,
)
from tests.models import small


def _dit(**changes) -> DiTConfig:
  return dataclasses.replace(small.DIT, **changes)


class ViTTest(parameterized.TestCase):
  def test_budgets_split_every_stage(self):
    expected = (HeadBudget(2, 1, 1, 4), HeadBudget(4, 2, 1, 3))
    self.assertEqual(small.TALL_VIT.budgets(), expected)
    self.assertEqual(small.TALL_VIT.activated_share, (2 + 2 * 3) / (2 + 2 * 4))

  @parameterized.parameters(
    ({}, "grid", [(8, 4), (4, 2)]),
    ({}, "pool_grid", [(4, 2), None]),
    ({"image_size": (15, 9)}, "grid", [(8, 5), (4, 3)]),  # rounded up
    ({"pretrain_image_size": 32}, "pretrain_grid", [(16, 16), (8, 8)]),
    ({"fixed_pool_size": 3}, "pool_grid", [(3, 3), None]),
  )
  def test_grids_follow_the_sizes(self, changes, name, expected):
    model = dataclasses.replace(small.TALL_VIT, **changes)
    found = [getattr(shape, name) for shape in model.stage_shapes()]
    self.assertEqual(found, expected)

  @parameterized.parameters(
    ((32, 16), {}, (48, 48)),
    ((24, 24), {"pretrain_image_size": 32}, (16, 16)),
    ((16, 32), {"pretrain_image_size": 32, "pretrain_columns": 16}, (16, 16)),
  )  # fmt: skip
  def test_other_sizes_keep_the_coordinates_of_both_sides(
    self, size, pretrain, other
  ):
    model = dataclasses.replace(small.TALL_VIT, image_size=size, **pretrain)
    expected = [shape.pretrain_grid for shape in model.stage_shapes()]
    found = model.inherited(Config(model), {"image_size": other})["model"]
    kept = {k: v for k, v in found.items() if k.startswith("pretrain")}
    finer = dataclasses.replace(model, image_size=other, **kept)
    grids = [shape.pretrain_grid for shape in finer.stage_shapes()]
    self.assertEqual(grids, expected)


class StackTest(parameterized.TestCase):
  def test_budgets_split_every_layer(self):
    split = (HeadBudget(4, 2, 1, 4), HeadBudget(6, 6, 0, 4))
    self.assertEqual(small.DIT.budgets(), (split[0], *split))
    self.assertEqual(small.DIT.activated_share, (3 + 3 + 6) / (4 + 4 + 6))
    self.assertEqual(
      small.DIT.layer_groups(),
      (LayerGroup(split[0], 2, 8, 6), LayerGroup(split[1], 1, 8, 6)),
    )
    names = list(small.DIT.layer_budgets())
    self.assertEqual(names, ["blocks0.0", "blocks0.1", "blocks1.0"])

  @parameterized.parameters(
    ((4, 6, 4), (2, 6, 2), (1, 0, 1), [1, 1, 1]),  # equal layers apart
    ((4, 4), (2, 2), (1, 2), [1, 1]),
  )
  def test_only_equal_neighbours_are_a_group(
    self, heads, shared, top_k, depths
  ):
    model = _dit(num_heads=heads, shared_heads=shared, top_k=top_k)
    found = [group.depth for group in model.layer_groups()]
    self.assertEqual(found, depths)
    off = without_router(model)  # its parameters stay in their places
    self.assertEqual([group.depth for group in off.layer_groups()], depths)

  def test_groups_have_the_orders_of_their_layers(self):
    orders = ((3, 0, 1, 2), (1, 2, 3, 0), (2, 1, 0, 3))
    heads = {"num_heads": (4,) * 3, "shared_heads": (1,) * 3}
    first, second = dataclasses.replace(
      small.LLM, **heads, top_k=(2, 2, 1), head_order=orders
    ).layer_groups()
    self.assertEqual((first.kv_heads, first.sees), (2, "before"))
    self.assertEqual(first.order_of_each, orders[:2])
    self.assertEqual(second.order_of_each, orders[2:])
    (group,) = small.LLM.layer_groups()
    self.assertEqual(group.order_of_each, ((0, 1, 2, 3),) * 2)


class WithoutRouterTest(parameterized.TestCase):
  @parameterized.parameters(small.TALL_VIT, small.DIT, small.LLM)
  def test_changes_the_kind_of_the_router_only(self, model):
    off = without_router(model)
    self.assertEqual(off.router.kind, "none")
    self.assertEqual(off.activated_share, 1.0)
    for budget, ours in zip(off.budgets(), model.budgets(), strict=True):
      full = HeadBudget(ours.num_heads, ours.num_heads, 0, ours.head_dim)
      self.assertEqual(budget, full)
    back = dataclasses.replace(off, router=RouterConfig("two_stage"))
    self.assertEqual(back, model)

  def test_fields_left_to_the_data_are_named(self):
    with self.assertRaisesRegex(ValueError, "model.channels=None must be"):
      small.TALL_VIT.check_complete()


class InheritedTest(absltest.TestCase):
  def test_what_belongs_to_the_old_data_stays_there(self):
    sample = SampleConfig(steps="5", cfg_scale=3.0, labels=(4, 2))
    trained = Config(model=small.DIT, sample=sample)
    found = small.DIT.inherited(trained, {})["sample"]
    expected = SampleConfig(steps="5", cfg_scale=3.0)
    self.assertEqual(found, dataclasses.asdict(expected))
