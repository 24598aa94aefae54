import dataclasses

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.training.variants import compared_runs, make_variant
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


def _scheduled(num_heads):
  """A model that ends with 4 shared and 2 of the other heads."""
  model = dataclasses.replace(
    tiny.LLM,
    num_heads=num_heads,
    num_kv_heads=4,
    shared_heads=(4, 4),
    top_k=(2, 2),
  )
  tune = config_lib.TuneConfig((0, 1, 2), (4, 3, 2))
  return dataclasses.replace(tiny.llm_config(), model=model, tune=tune)


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

  @parameterized.parameters(
    # Halves, for which floats are a little too small: 0.58 * 25 < 14.5.
    ("moh58", 25, 15),
    ("moh70", 45, 32),
    ("moh29", 50, 15),
    ("moh57", 50, 29),
    ("moh34", 25, 9),
    ("moh100-shared58", 25, 15),
  )
  def test_of_two_nearest_numbers_the_larger_one(self, name, heads, count):
    model = dataclasses.replace(
      _MODEL, num_heads=(heads,), shared_heads=(1,), top_k=(heads - 1,)
    )
    made = make_variant(dataclasses.replace(_CONFIG, model=model), name).model
    found = made.shared_heads[0]
    if "shared" not in name:
      found += made.top_k[0]
    self.assertEqual(found, count)

  @parameterized.parameters(
    ("config", (4, 3, 2)),
    ("mha", ()),
    ("moh50", (5, 3, 1)),  # the shared ones become 3, the others 5
    ("moh100", (3, 3, 3)),
    ("moh50-shared0", (8, 6, 4)),
    ("config-shared99", (3, 2, 1)),
  )
  def test_schedule_goes_from_all_heads_to_the_budget(self, name, values):
    made = make_variant(_scheduled((8, 8)), name)
    self.assertEqual(made.tune.top_k_values, values)
    self.assertLen(made.tune.top_k_steps, len(values))

  def test_schedule_needs_one_budget(self):
    with self.assertRaisesRegex(ValueError, "shared0': tune.top_k_values.*end"):
      make_variant(_scheduled((8, 12)), "moh25-shared0")

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


class ComparedRunsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Two spellings of a value are one setting.
    ("optim.lr", "1e-3,0.001,2e-3", ["1e-3", "2e-3"]),
    ("optim.lr", "1e-3,0.001", ["1e-3"]),
    ("optim.no_decay", "*bias,('*bias','a,b')", ["*bias", "('*bias','a,b')"]),
    ("train.init_from", "a/b,2024", ["a/b", "2024"]),
    ("model.num_heads", "(8,8,4),(9,9,4)", ["(8,8,4)", "(9,9,4)"]),
    # The baseline has no router and no top_k to sweep.
    ("model.top_k", "(3,2,0),(4,3,0)", ["(3,2,0)", "(4,3,0)"], [""]),
    ("model.router.kind", "two_stage,query_norm", ["two_stage", "query_norm"],
     [""]),
  )  # fmt: skip
  def test_settings(self, key, values, config, mha=None):
    runs = compared_runs(_CONFIG, ["mha", "config"], f"{key}={values}", 1)
    self.assertEqual(
      [(run.variant, run.setting.removeprefix(f"{key}=")) for run in runs],
      [
        *(("mha", value) for value in mha or config),
        *(("config", value) for value in config),
      ],
    )
    self.assertLen({repr(run.config) for run in runs}, len(runs))
    for run in runs:
      is_mha = run.config.model.router.kind == "none"
      self.assertEqual(run.variant == "mha", is_mha)

  def test_tuples_are_swept(self):
    runs = compared_runs(_CONFIG, ["config"], "model.top_k=(3,2,0),[4,3,0]", 1)
    found = [run.config.model.top_k for run in runs]
    self.assertEqual(found, [(3, 2, 0), (4, 3, 0)])

  def test_the_weight_of_the_balance_changes_nothing_without_a_router(self):
    runs = compared_runs(
      _CONFIG, ["mha", "config"], "train.balance_weight=0,1", 1
    )
    rows = [run.row for run in runs]
    weights = [f"config train.balance_weight={n}" for n in (0, 1)]
    self.assertEqual(rows, ["mha", *weights])

  def test_swept_sizes_keep_the_share_of_a_variant(self):
    sweep = "model.num_heads=(8,8,4),(16,12,4)"
    for run in compared_runs(_CONFIG, ["moh50"], sweep, 1):
      active = [b.active for b in run.config.model.budgets()][:2]
      heads = run.config.model.num_heads[:2]
      self.assertEqual([2 * count for count in active], list(heads))

  @parameterized.parameters(
    "train.seed=1,2", "train.seed=4", "log.every=1,2", "=1,2"
  )
  def test_sweeps_that_change_nothing_are_refused(self, sweep):
    with self.assertRaisesRegex(ValueError, f"--sweep '{sweep}'"):
      compared_runs(_CONFIG, ["mha", "config"], sweep, 1)

  def test_names_are_those_of_files(self):
    long = ",".join(f"({i},3,0)" for i in range(1, 3))
    sweeps = (
      "train.init_from=/a/b,_a_b,../x,a b,é,a\\b",
      f"model.top_k={long}",
      "optim.no_decay=*bias,?bias,('a','b'),('a,b',),(*/a,*/b),(*/a,*/c)",
      f"train.init_from={'x' * 300},{'x' * 301}",
    )
    names = []
    for sweep in sweeps:
      runs = compared_runs(_CONFIG, ["config"], sweep, 1)
      self.assertGreater(len(runs), 1)
      names += [run.name for run in runs]
    for name in names:
      self.assertRegex(name, r"^config-[A-Za-z0-9_.=+,-]{1,120}-seed0$")
    self.assertLen(set(names), len(names))

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
