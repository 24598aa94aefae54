"""Variants of a run, and the runs of a comparison."""

import itertools

import jax
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.runtime.parameters import abstract_params
from moh_jax.training.task import task_builder
from moh_jax.training.variants import compared_runs, make_variant
from tests.training import tiny

_MODEL = config_lib.DiTConfig(
  channels=1,
  num_classes=10,
  input_size=(8, 8),
  width=32,
  num_heads=(8, 8, 4),
  head_dim=4,
  shared_heads=(2, 3, 4),
  top_k=(4, 3, 0),  # the last layer routes nothing
)
_CONFIG = tiny.dit_config(model=_MODEL)
_BOTH = ("mha", "config")


def _grouped(structure):
  count = (4, 4) if structure == "per_group" else (3, 3)
  return tiny.llm_config(
    model={
      "num_heads": (12, 12),
      "num_kv_heads": 4,
      "shared_heads": count,
      "top_k": count,
      "router": config_lib.RouterConfig(structure=structure),
    }
  )


def _num_params(config):
  objective = task_builder(config).make_objective(config)
  params = abstract_params(objective.model, objective.inputs)
  return sum(x.size for x in jax.tree.leaves(params))


class VariantsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("moh75", (2, 3, 4), (4, 3, 0)),
    ("moh50", (1, 2, 4), (3, 2, 0)),  # a third of 4 is shared, and the half
    ("moh50-shared0", (0, 0, 4), (4, 4, 0)),
    ("config-shared99", (5, 5, 4), (1, 1, 0)),  # one head stays routed
    ("moh75-onestage-shared50", (3, 3, 4), (3, 3, 0)),
    ("moh75-first", (8, 2, 4), (0, 2, 0)),  # all heads, and 4 of 8
    ("moh50-last", (1, 3, 4), (1, 3, 0)),  # 2 and 6 of 8
    ("config-last", (1, 8, 4), (3, 0, 0)),
  )
  def test_budgets(self, name, shared, top_k):
    model = make_variant(_CONFIG, name).model
    self.assertEqual((model.shared_heads, model.top_k), (shared, top_k))
    self.assertEqual(model.router.two_stage, "onestage" not in name)

  def test_of_two_nearest_numbers_the_larger_one(self):
    # A half, for which floats are a little too small: 0.58 * 25 < 14.5.
    heads = {"num_heads": (25,), "shared_heads": (1,), "top_k": (24,)}
    config = tiny.changed(_CONFIG, model=heads)
    [budget] = make_variant(config, "moh58").model.budgets()
    self.assertEqual(budget.active, 15)

  @parameterized.parameters(
    ("per_group", "moh50", (4, 4)),
    ("whole_group", "moh50", (3, 3)),
    ("per_group", "gate", (12, 0)),
  )
  def test_budgets_of_structures(self, structure, name, split):
    config = _grouped(structure)
    [budget] = set(make_variant(config, name).model.budgets())
    self.assertEqual((budget.shared, budget.top_k), split)

  @parameterized.parameters(
    ("moh67-per_group", (4, 4), (4, 4)),
    ("config-whole_group", (3, 3), (6, 6)),
    ("moh67-last-per_group", (0, 12), (4, 0)),
  )
  def test_another_structure(self, name, shared, top_k):
    config = _grouped("per_group")
    free = config_lib.RouterConfig()
    config = tiny.changed(
      config, model={"router": free, "shared_heads": (4, 4), "top_k": (5, 5)}
    )
    model = make_variant(config, name).model
    self.assertTrue(name.endswith(model.router.structure))
    self.assertEqual((model.shared_heads, model.top_k), (shared, top_k))

  def test_schedules_follow_the_layers_that_choose(self):
    tune = config_lib.TuneConfig((0, 1), (8, 4))
    config = tiny.changed(_grouped("per_group"), tune=tune)
    self.assertEqual(make_variant(config, "mha").tune, tune)  # has no effect
    with self.assertRaisesRegex(ValueError, "moh75-shared0': .* must end with"):
      make_variant(config, "moh75-shared0")
    with self.assertRaisesRegex(ValueError, "must be multiples of 4 for model"):
      tiny.changed(config, tune={"top_k_values": (6, 4)})
    heads = {"num_heads": (12, 8), "shared_heads": (3, 8), "top_k": (3, 0)}
    tune = config_lib.TuneConfig((0, 1), (9, 3))
    made = tiny.changed(_grouped("whole_group"), model=heads, tune=tune)
    self.assertEqual(make_variant(made, "config").tune, tune)

  @parameterized.parameters(
    ("dit", "mha50-wide", (4, 4, 2), 0),
    ("llm", "mha50", (6, 6), 3),
    ("llm", "mha75-wide", (9, 9), 3),
  )
  def test_fewer_heads(self, family, name, heads, kv_heads):
    config = _CONFIG if family == "dit" else _grouped("per_group")
    made = make_variant(config, name).model
    self.assertEqual((made.num_heads, made.num_kv_heads), (heads, kv_heads))
    self.assertEqual({b.top_k for b in made.budgets()}, {0})
    before, after = (
      _num_params(make_variant(config, x)) for x in ("mha", name)
    )  # fmt: skip
    if "wide" in name:
      self.assertAlmostEqual(after / before, 1, delta=0.005)
    else:
      self.assertLess(after, before)

  @parameterized.parameters("dit", "llm")
  def test_twice_the_heads_take_their_parameters_from_the_mlp(self, family):
    config = _CONFIG if family == "dit" else _grouped("per_group")
    config = tiny.changed(
      config, model={"mlp_ratio": 16.0} if family == "dit" else {"mlp_dim": 96}
    )
    made = make_variant(config, "moh50-double").model
    self.assertEqual(
      made.num_heads, tuple(2 * n for n in config.model.num_heads)
    )
    first = made.budgets()[0]
    self.assertEqual(first.active, config.model.num_heads[0])
    self.assertEqual(made.num_kv_heads, config.model.num_kv_heads)
    before, after = (
      _num_params(make_variant(config, x)) for x in ("config", "moh50-double")
    )  # fmt: skip
    # Its router is larger.
    self.assertEqual(made.router, config.model.router)
    self.assertAlmostEqual(after / before, 1, delta=0.02)

  def test_what_there_is_not_is_refused(self):
    router = config_lib.RouterConfig("query_norm")
    normed = tiny.changed(_CONFIG, model={"router": router})
    unknown = "must be config, mha, gate, mhaNN"
    for name, message, config in (
      *((name, unknown, _CONFIG) for name in ("moh", "mha-onestage", "mha0")),
      ("moh50", "kind='none' routes none", make_variant(_CONFIG, "mha")),
      ("config-onestage", "kind='query_norm' has one", normed),
    ):
      with self.assertRaisesRegex(ValueError, message):
        make_variant(config, name)


class ComparedRunsTest(parameterized.TestCase):
  def test_every_variant_value_and_seed(self):
    config = config_lib.apply_overrides(_CONFIG, "train", seed=5)
    key, values = "model.num_heads", ["(8,8,4)", "(9,9,4)"]
    runs = compared_runs(config, _BOTH, f"{key}={','.join(values)}", 2)
    settings = [f"{key}={value}" for value in values]
    self.assertEqual(
      [(run.config.train.seed, run.variant, run.setting) for run in runs],
      list(itertools.product((5, 6), _BOTH, settings)),
    )
    for run in runs:
      is_mha = run.config.model.router.kind == "none"
      self.assertEqual(run.variant == "mha", is_mha)
    self.assertLen({repr(run.config) for run in runs}, len(runs))

  def test_names_are_those_of_files(self):
    sweep = "train.init_from=/a/b,../x,a b,\u00e9"
    names = [run.name for run in compared_runs(_CONFIG, ["config"], sweep, 1)]
    self.assertLen(set(names), 4)
    for name in names:
      self.assertRegex(name, r"^config-[A-Za-z0-9_.=+,-]+-seed0$")

  @parameterized.parameters(
    ("optim.lr", "must be SECTION.FIELD=VALUE,VALUE"),
    ("optim.rate=1,2", "unknown config key optim.rate"),
  )
  def test_wrong_options_are_refused(self, sweep, message):
    with self.assertRaisesRegex(ValueError, message):
      compared_runs(_CONFIG, _BOTH, sweep, 1)
