from absl.testing import absltest, parameterized

from moh_jax.config import HeadBudget, RouterConfig


class HeadBudgetTest(parameterized.TestCase):
  def test_counts(self):
    budget = HeadBudget(num_heads=8, shared=2, top_k=4, head_dim=16)
    self.assertEqual((budget.routed, budget.active, budget.share), (6, 6, 0.75))

  @parameterized.parameters(
    ((0, 0, 0, 4), r"num_heads=0 .*at least 1"),
    ((4, 1, 1, 0), r"head_dim=0 .*at least 1"),
    ((4, -1, 2, 4), r"shared=-1 .*\[0, 4\]"),
    ((4, 5, 0, 4), r"shared=5 .*\[0, 4\]"),
    ((4, 1, -1, 4), r"top_k=-1 .*\[0, 3\]"),
    ((4, 1, 4, 4), r"top_k=4 .*\[0, 3\]"),
    ((4, 0, 0, 4), r"shared=0 and top_k=0"),
    ((4, 1, 1.5, 4), r"top_k=1\.5 .*integer"),
    ((4, True, 1, 4), r"shared=True .*integer"),
  )
  def test_rejects_split_naming_field_and_value(self, split, message):
    with self.assertRaisesRegex(ValueError, message):
      HeadBudget(*split)


class RouterConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"kind": "one_stage"}, r"'one_stage' .*two_stage.*none"),
    ({"kind": "norm"}, r"router\.kind='norm' .*two_stage.*query_norm.*none"),
    ({"gate_form": "release"}, r"gate_form='release' .*released.*paper"),
    ({"straight_through": "no"}, r"straight_through='no' .*selected.*all"),
  )
  def test_rejects_unknown_names_listing_the_known(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      RouterConfig(**fields)


if __name__ == "__main__":
  absltest.main()
