import dataclasses
import json
import pathlib
import runpy
import tempfile

import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.config import parse
from moh_jax.runtime import checkpoint
from moh_jax.runtime.devices import parse_topology
from moh_jax.runtime.steps import load_config
from moh_jax.training.plan import make_plan
from moh_jax.training.variants import make_variant

_CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
# Files -> the arguments that they list, of which the first is the default.
_ARGUMENTS = {
  path.stem: tuple(runpy.run_path(str(path)).get("ARGUMENTS", ()))
  for path in sorted(_CONFIGS.glob("*.py"))
}
_DEFAULTS = {"dit": "xl2_90", "llama3_moh": "stage2"}  # not the first
# Those that take the model of a checkpoint, and one that they may start from.
_FINETUNE = (
  ("vit", "finetune_384", ("vit", "s80")),
  ("images", "finetune", ("vit_digits", "moh")),
  ("dit", "finetune", ("dit", "s2_90")),
  ("dit", "finetune_pixels", ("dit_digits", "moh")),
  ("llm_tune", "dense", ("llm_stdlib", "moh")),
)
# Those that read a file of so many layers and heads.
_ORDERED = (
  ("llm_tune", "", ("llm_stdlib", "mha"), (4, 8)),
  ("llm_stdlib", "importance:", None, (4, 8)),
  ("llama3_moh", "stage2:", None, (32, 32)),
  ("llama3_moh", "stage2_schedule:", None, (32, 32)),
  ("llama3_moh", "70b_stage2:", None, (80, 64)),
)
_ALL = [
  (name, arg)
  for name, args in _ARGUMENTS.items()
  for arg in args
  if not arg.startswith(("finetune", "importance"))
]
_RUNS = (*_ALL, *_FINETUNE, *_ORDERED)
_PLANNED = (
  *(("vit_digits", "moh"), ("dit_digits", "mha"), ("dit_digits", "flow")),
  ("llm_stdlib", "schedule"),
)
_FILES = [name for name, args in _ARGUMENTS.items() if args]  # with a default


def _spec(name, arg):
  return f"{_CONFIGS / name}.py:{arg}"


def _checkpoint(test, name, arg):
  """A folder with a checkpoint of a config, whose parameters are none."""
  folder = test.enterContext(tempfile.TemporaryDirectory())
  metadata = checkpoint.Metadata(load_config(_spec(name, arg)), ())
  checkpoint.save_params(folder, {"w": np.zeros(1, np.float32)}, metadata)
  return folder


class ConfigsTest(parameterized.TestCase):
  @parameterized.parameters(
    *((*run[:2], "add --config.train.init_from=DIR") for run in _FINETUNE),
    ("llm_tune", "", "llm_tune.py.*: '' must be 'dense', 'lora' or"),
  )
  def test_what_a_run_starts_from_must_be_said(self, name, arg, words):
    with self.assertRaisesRegex(ValueError, words):
      load_config(_spec(name, arg))

  @parameterized.parameters(*_FILES)
  def test_arguments_have_a_default_and_are_listed(self, name):
    default = _DEFAULTS.get(name, _ARGUMENTS[name][0])
    self.assertEqual(
      load_config(str(_CONFIGS / f"{name}.py")),
      load_config(_spec(name, default)),
    )
    with self.assertRaises(ValueError) as caught:
      load_config(_spec(name, "huge"))
    for arg in _ARGUMENTS[name]:
      self.assertIn(repr(arg), str(caught.exception))

  @parameterized.parameters(*_FILES)
  def test_every_leaf_can_be_stated_by_a_flag(self, name):
    spec = _spec(name, _ARGUMENTS[name][0])
    plain = load_config(spec)
    leaves = parse.leaves(config_lib.to_dict(plain))
    stated = [f"{path}={value}" for path, value in leaves.items()]
    self.assertEqual(load_config(spec, stated), plain)


# The demos with the warm-up that their recorded results were trained with.
_DEMOS = (
  (("vit_digits", "moh"), 50), (("dit_digits", "long"), 100),
  (("llm_stdlib", "moh"), 40), (("llm_stdlib", "schedule"), 5),
)  # fmt: skip


class DemosTest(parameterized.TestCase):
  @parameterized.parameters(*_DEMOS)
  def test_schedule_follows_the_steps(self, demo, warmup):
    config = load_config(_spec(*demo))
    self.assertEqual(config.scheduled().optim.warmup_steps, warmup)
    for steps in (1, 30):
      short = load_config(_spec(*demo), [f"train.steps={steps}"]).scheduled()
      self.assertLessEqual(short.optim.warmup_steps, steps // 5)
      self.assertEqual(short.log.every, 1)
      self.assertLess(max(short.tune.top_k_steps, default=0), steps)


class PlanTest(parameterized.TestCase):
  """Every file with every argument is planned and has its variants."""

  def _load(self, name, arg, source=None, orders=None):
    overrides = []
    if source:
      overrides = [f"train.init_from={_checkpoint(self, *source)}"]
    if orders:
      file = pathlib.Path(self.create_tempdir().full_path, "heads.json")
      depth, heads = orders
      order = list(range(heads))[::-1]
      file.write_text(json.dumps({"head_order": [order] * depth}))
      arg += str(file)
    return load_config(_spec(name, arg), overrides)

  @parameterized.parameters(*_RUNS)
  def test_has_variants(self, *run):
    config = self._load(*run)
    mha = make_variant(config, "mha")
    self.assertEqual(mha.model.router.kind, "none")
    self.assertEqual(make_variant(config, "config"), config)
    if config.model.router.kind != "none" and not config.tune.top_k_values:
      half = make_variant(config, "moh50")
      self.assertEqual(half.train, config.train)

  @parameterized.parameters(*_PLANNED)
  @pytest.mark.integration
  def test_small_ones_are_planned(self, *run):
    self._check_plan(*run)

  @parameterized.parameters(*(run for run in _RUNS if run not in _PLANNED))
  @pytest.mark.slow  # minutes
  def test_others_are_planned(self, *run):
    self._check_plan(*run)

  def _check_plan(self, *run):
    devices = "h200:64" if run[0] in ("llm", "llama3_moh") else "h200:4"
    if run[1].endswith("_8k"):  # 16 sequences at a time
      devices = "h200:16"
    if run[1].endswith("lora"):  # one at a time
      devices = "h200:1"
    plan = make_plan(self._load(*run), parse_topology(devices), compiles=False)
    routes = plan.config.model.router.kind != "none"
    self.assertGreater(plan.flops, 0)
    self.assertEqual(plan.flops < plan.baseline_flops, routes)


_EPOCH = 1_281_167 // 1024
# Values of the papers (arXiv:2410.11842 and, of DiT, arXiv:2212.09748), not of
# the files: file, arguments, keys as on a command line.
_MOH_OF_DIT = tuple(
  arg for arg in _ARGUMENTS["dit"] if arg[-3:] in ("_90", "_75")
)
_PLAIN_DIT = tuple(arg for arg in _ARGUMENTS["dit"] if len(arg) in (2, 3))
_OF_VIT = ("s80", "s75", "b75", "b50", "micro", "tiny", "small", "base")
_VIT_RECIPE = f"""
  optim.lr=1e-3 optim.warmup_lr=1e-6 optim.final_lr=1e-5 optim.b1=0.9
  optim.b2=0.999 optim.eps=1e-8 optim.weight_decay=0.05 optim.clip_norm=1.0
  optim.schedule=cosine optim.warmup_steps={5 * _EPOCH} optim.ema_decay=0
  optim.accumulation=1 data.batch_size=1024 train.steps={300 * _EPOCH}
  train.balance_weight=0.01 classifier.label_smoothing=0.1
  classifier.mixup=0.8 classifier.cutmix=1.0 classifier.cutmix_prob=0.5
  model.image_size=(224,224) model.num_classes=1000 data.eval_resize=256
  data.mean=(0.485,0.456,0.406) data.std=(0.229,0.224,0.225)
  data.augment=crop_flip data.auto_augment=rand-m9-mstd0.5-inc1
  data.random_erasing=0.25 data.repeats=3
"""
_DIT_RECIPE = """
  optim.lr=1e-4 optim.schedule=constant optim.b1=0.9 optim.b2=0.999
  optim.eps=1e-8 optim.weight_decay=0 optim.clip_norm=0 optim.warmup_steps=0
  optim.accumulation=1 optim.ema_decay=0.9999 data.batch_size=256
  train.balance_weight=0.01 diffusion.schedule=linear diffusion.steps=1000
  diffusion.prediction=epsilon diffusion.latent_scale=none
  diffusion.vb_weight=1 sample.method=ddpm
  sample.steps=250 sample.cfg_scale=1.5 sample.cfg_channels=three
  model.input_size=(32,32) model.channels=4 model.num_classes=1000
  model.label_dropout=0.1 model.learn_sigma=True
"""
_RECIPES = (
  ("vit", _OF_VIT, _VIT_RECIPE),
  ("vit", ("s80", "s75", "small"), "model.drop_path=0.45"),
  ("vit", ("b75", "b50", "base"), "model.drop_path=0.6"),
  ("vit", ("micro",), "model.drop_path=0.15"),
  ("vit", ("tiny",), "model.drop_path=0.25"),
  ("vit", ("micro", "tiny", "small", "base"), "model.router.kind=none"),
  ("vit", ("s80", "s75", "b75", "b50"), "model.router.kind=two_stage"),
  ("vit", ("s80",), "model.shared_heads=(3,6,3,8) model.top_k=(0,0,6,12)"),
  ("vit", ("s75",), "model.shared_heads=(3,6,3,4) model.top_k=(0,0,6,12)"),
  ("vit", ("b75",), "model.shared_heads=(4,8,4,5) model.top_k=(0,0,8,16)"),
  ("vit", ("b50",), "model.shared_heads=(2,2,2,4) model.top_k=(2,4,6,8)"),
  ("dit", (*_MOH_OF_DIT, *_PLAIN_DIT), _DIT_RECIPE),
  ("dit", _MOH_OF_DIT, "model.router.kind=two_stage model.patch_size=2"),
  ("dit", _PLAIN_DIT, "model.router.kind=none"),
  ("dit", ("s4", "b4", "l4", "xl4"), "model.patch_size=4"),
  ("dit", ("s8", "b8", "l8", "xl8"), "model.patch_size=8"),
  ("dit", ("xl2_90", "xl2_75", "xl2", "xl8"), "train.steps=7000000"),
  ("dit", ("s2_90", "b2_75", "l2", "l8"), "train.steps=400000"),
  *(
    (
      "llm",
      args,
      f"""
      optim.lr={lr} optim.final_lr={final_lr} optim.warmup_steps={warmup}
      optim.warmup_lr=1e-7 optim.weight_decay=0.1 optim.clip_norm=1
      optim.schedule=cosine data.batch_size=2048 data.sequence_length=2048
      train.balance_weight=0.01 train.steps={steps}
      """,
    )
    for args, lr, final_lr, warmup, steps in (
      (("s75", "s50", "s"), "3e-4", "3e-5", 2000, 23841),
      (("b75", "b50", "b"), "5e-4", "5e-5", 500, 23841),
      (("s75_200",), "3e-4", "3e-5", 2000, 47683),
    )
  ),
)


class RecipeTest(parameterized.TestCase):
  @parameterized.parameters(
    *((name, arg, keys) for name, args, keys in _RECIPES for arg in args)
  )
  def test_to_state_the_papers_values_changes_nothing(self, name, arg, keys):
    spec = _spec(name, arg)
    plain, stated = (load_config(spec, x) for x in ((), keys.split()))
    for section, values in plain.by_name().items():
      lines = config_lib.differing_fields(
        values, stated.by_name()[section], section
      )
      self.assertEmpty(lines)

  @parameterized.parameters(
    ("s2_90", 384, {(6, 3, 2): 8, (6, 6, 0): 4}),
    ("b2_90", 768, {(12, 6, 4): 5, (12, 7, 4): 5, (12, 12, 0): 2}),
    ("l2_75", 1024, {(8, 8, 0): 8, (16, 8, 4): 8, (24, 12, 4): 8}),
    ("xl2_90", 1152, {(8, 8, 0): 9, (16, 16, 0): 10, (24, 16, 3): 9}),
    ("xl8", 1152, {(16, 16, 0): 28}),
  )
  def test_head_budgets_of_dit(self, arg, width, runs):
    model = load_config(_spec("dit", arg)).model
    self.assertEqual(model.width, width)
    found = {
      dataclasses.astuple(group.budget)[:3]: group.depth
      for group in model.layer_groups()
    }
    self.assertEqual(found, runs)

  def test_fine_tuning_at_384_pixels_is_transnexts(self):
    folder = _checkpoint(self, "vit", "s80")
    config = load_config(
      _spec("vit", "finetune_384"), [f"train.init_from={folder}"]
    )
    stated = load_config(
      _spec("vit", "s80"),
      """model.image_size=(384,384) model.pretrain_image_size=224
      model.drop_path=0 model.num_classes=none data.eval_resize=0
      classifier.cutmix=0 optim.lr=1e-5 optim.schedule=constant
      optim.warmup_steps=0""".split(),
    )
    self.assertEqual(config.model, stated.model)
    self.assertEqual(config.data, stated.data)
    self.assertEqual(config.classifier, stated.classifier)
    rates = {"warmup_lr": 0.0, "final_lr": 0.0}  # of no warm-up and no fall
    self.assertEqual(config.optim, dataclasses.replace(stated.optim, **rates))
    self.assertEqual(config.train.steps, 5 * _EPOCH)


class SmallRunsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("vit_digits", "moh", "mha", 3 / 4),
    ("dit_digits", "moh", "mha", 2 / 3),
    ("dit_digits", "long", "mha_long", 2 / 3),
    ("images", "small", "small_mha", 3 / 4),
    ("images", "medium", "medium_mha", 3 / 4),
    ("llm_stdlib", "moh", "mha", 3 / 4),
  )
  def test_baseline_is_the_same_network_without_a_router(
    self, name, moh, mha, share
  ):
    moh, mha = (load_config(_spec(name, arg)) for arg in (moh, mha))
    lines = config_lib.differing_fields(moh.model, mha.model, "model")
    fields = [line.partition(":")[0] for line in lines]
    self.assertEqual(fields, ["model.router.kind"])
    self.assertEqual(dataclasses.replace(moh, model=mha.model), mha)
    self.assertEqual({b.share for b in moh.model.budgets()}, {share})
