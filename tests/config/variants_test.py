import dataclasses

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config.variants import compared_runs, make_variant
from tests.training import tiny

_MODEL = config_lib.DiTConfig(
  input_size=(8, 8),
  width=32,
  num_heads=(8, 8, 4),
  head_dim=4,
  shared_heads=(2, 3, 4),
  top_k=(4, 3, 0),  # the last layer routes nothing
)
_CONFIG = dataclasses.replace(tiny.dit_config(), model=_MODEL)


class VariantsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("config", (2, 3, 4), (4, 3, 0)),
    ("moh75", (2, 3, 4), (4, 3, 0)),
    ("moh50", (1, 2, 4), (3, 2, 0)),  # a third of 4 is shared, and the half
    ("moh100", (3, 4, 4), (5, 4, 0)),
    ("moh1", (0, 0, 4), (1, 1, 0)),
    ("moh50-shared0", (0, 0, 4), (4, 4, 0)),
    ("config-shared99", (5, 5, 4), (1, 1, 0)),  # one head stays routed
    ("moh75-onestage-shared50", (3, 3, 4), (3, 3, 0)),
  )
  def test_budgets(self, name, shared, top_k):
    model = make_variant(_CONFIG, name).model
    self.assertEqual((model.shared_heads, model.top_k), (shared, top_k))
    self.assertEqual(model.router.two_stage, "onestage" not in name)

  def test_the_baseline_has_no_router(self):
    made = make_variant(_CONFIG, "mha")
    self.assertEqual(made.model.router.kind, "none")
    self.assertEqual(made.model.activated_share, 1.0)

  @parameterized.parameters(
    ("moh", "must be config, mha or mohNN"),
    ("mha-onestage", "must be config, mha or mohNN"),
    ("moh0", "0 % must be from 1 to 100"),
    ("moh101", "101 % must be from 1 to 100"),
    ("moh50-shared100", "100 % must be from 0 to 99"),
  )
  def test_other_names_are_refused(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      make_variant(_CONFIG, name)

  def test_variants_need_a_router_to_vary(self):
    mha = make_variant(_CONFIG, "mha")
    with self.assertRaisesRegex(ValueError, "needs a config that routes heads"):
      make_variant(mha, "moh50")
    router = config_lib.RouterConfig(kind="query_norm")
    model = dataclasses.replace(_MODEL, router=router)
    tuned = dataclasses.replace(_CONFIG, model=model)
    with self.assertRaisesRegex(ValueError, "kind='two_stage', not 'query_no"):
      make_variant(tuned, "config-onestage")


class ComparedRunsTest(absltest.TestCase):
  def test_every_variant_value_and_seed(self):
    config = config_lib.apply_overrides(_CONFIG, "train", seed=5)
    runs = compared_runs(config, ["mha", "moh50"], "optim.lr=1e-3,0.01", 2)
    self.assertLen({run.name for run in runs}, 8)
    self.assertEqual(
      [(run.row, run.seed) for run in runs[:5]],
      [
        ("mha optim.lr=1e-3", 5),
        ("mha optim.lr=0.01", 5),
        ("moh50 optim.lr=1e-3", 5),
        ("moh50 optim.lr=0.01", 5),
        ("mha optim.lr=1e-3", 6),
      ],
    )
    last = runs[-1].config
    self.assertEqual((last.optim.lr, last.train.seed), (0.01, 6))
    self.assertEqual(last.model.top_k, (3, 2, 0))

  def test_wrong_options_are_refused(self):
    for variants, sweep, message in (
      (["mha", "mha"], "", "--variants: 'mha' is named twice"),
      (["mha"], "optim.lr", "must be SECTION.FIELD=VALUE,VALUE"),
      (["mha"], "optim.lr=1,1", "--sweep: 'optim.lr=1' is named twice"),
      (["mha"], "optim.rate=1,2", "unknown config key optim.rate"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        compared_runs(_CONFIG, variants, sweep, 1)


if __name__ == "__main__":
  absltest.main()
