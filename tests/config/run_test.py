"""Whole runs: how their sections fit, and their forms as dicts and JSON."""

import dataclasses
import functools
import json
import pickle
import re

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import Config, parse
from tests.models import small
from tests.training import tiny

_VIT = Config(
  model=small.ONE_STAGE,
  data=config_lib.DataConfig(batch_size=12),
  optim=config_lib.OptimConfig(lr=3e-4, no_decay=("*/bias", "*/scale")),
  checkpoint=config_lib.CheckpointConfig(keep_last=3),
)
_DIT = Config(
  model=config_lib.DiTConfig(
    num_heads=(6,), shared_heads=(3,), top_k=(2,), num_classes=10
  ),
  data=config_lib.DataConfig(source="latents", path="some/latents"),
  diffusion=config_lib.DiffusionConfig(steps=500, prediction="v"),
  sample=config_lib.SampleConfig(steps="ddim50"),
)
_PIXEL = parse.changed(
  _DIT,
  "model.channels=1 model.input_size=8,8 data.source=digits data.path= "
  "data.mean=0.5, data.std=0.5, diffusion.space=pixel".split(),
)
_FLOW = parse.changed(
  _PIXEL,
  "model.learn_sigma=false diffusion.schedule=flow sample.method=heun "
  "diffusion.prediction=velocity sample.steps=20".split(),
)
_MIX = {"mix": ("web", "code"), "ratios": (66.7, 33.3)}
_LLM = tiny.llm_config(
  model={"head_order": ((3, 2, 1, 0), (0, 1, 2, 3))},
  data={"source": "tokens", "path": "somewhere", **_MIX},
  tune={"top_k_steps": (0, 3), "top_k_values": (3, 2)},
)
_RUNS = {"vit": _VIT, "dit": _DIT, "pixel": _PIXEL, "flow": _FLOW, "llm": _LLM}
_SCHEDULE = "tune.top_k_steps=0,2 tune.top_k_values=3,2"
# Run, changed keys, what the message says.
_REFUSED = (
  ("vit", "model.channels=1 data.mean=0,0,0 data.std=1,1,1",
   "data.mean=(0.0, 0.0, 0.0) must have model.channels=1 values"),
  ("vit", "optim.warmup_steps=1001", "must be at most train.steps=1000"),
  ("vit", "optim.schedule=wsd optim.decay_steps=990",
   "optim.decay_steps=990 must be at most train.steps=1000 less the 50 steps"),
  ("dit", "data.augment=shift", "'shift' must be 'none' for latents"),
  ("pixel", "diffusion.space=latent", "data.source='digits' must hold"),
  ("pixel", "data.mean=0.3,",
   "data.mean=(0.3,) must be 0.5 for diffusion.space='pixel'"),
  ("dit", "sample.steps=250,251", "'250,251' asks for 251 of the 250"),
  ("dit", "model.label_dropout=0", "sample.cfg_scale=1.5 must be 1"),
  ("flow", "model.learn_sigma=true", "learn_sigma=True must be False"),
  ("flow", "sample.steps=ddim50", "steps='ddim50' must be a number"),
  ("llm", "data.sequence_length=33", "must be at most model.max_length=32"),
  ("llm", "tune.top_k_steps=0,2 tune.top_k_values=3,1",
   "must end with the routing layers' top_k (2,)"),
  ("llm", f"{_SCHEDULE} model.top_k=2,3", "the routing layers' top_k (2, 3)"),
)  # fmt: skip


def _changed(section, run=_VIT, **fields):
  cfg = config_lib.to_config_dict(run).to_dict()
  cfg[section] = {**cfg[section], **fields}
  return cfg


class ChecksTest(parameterized.TestCase):
  @parameterized.parameters(*_REFUSED)
  def test_sections_that_do_not_fit_are_named(self, run, keys, words):
    with self.assertRaisesRegex(ValueError, re.escape(words)):
      parse.changed(_RUNS[run], keys.split())

  @parameterized.parameters(
    ("pixel", "data.source=fake diffusion.space=latent"),
    # Latents are not normalized by the data.
    ("dit", "data.mean=1,2,3,4,5 data.std=1,2,3,4,5"),
    # A schedule ignores layers that route nothing.
    ("llm", f"{_SCHEDULE} model.shared_heads=4,1 model.top_k=0,2"),
    ("llm", f"{_SCHEDULE} model.router.kind=none"),
  )
  def test_sections_that_fit_are_taken(self, run, keys):
    self.assertNotEqual(parse.changed(_RUNS[run], keys.split()), _RUNS[run])

  @parameterized.parameters(
    ("dit", "diffusion", None, "'diffusion' must be a DiffusionConfig for"),
    ("llm", "data", config_lib.DataConfig(), "'llm', not a DataConfig"),
    ("vit", "tune", config_lib.TuneConfig((0,), (1,)), r"must be \(\) for mod"),
    ("dit", "classifier", config_lib.ClassifierConfig(), "unknown config sec"),
  )
  def test_sections_are_those_of_the_family(self, run, name, section, words):
    with self.assertRaisesRegex(ValueError, words):
      dataclasses.replace(_RUNS[run], **{name: section})


class ScheduleTest(parameterized.TestCase):
  """What a run leaves to its number of steps."""

  @parameterized.parameters(
    (2, 0, 20, 20, 1, 1, (0,), (2,)),
    (500, 50, 50, 100, 20, 50, (0, 166), (3, 2)),
    (10**6, 2000, 1000, 1000, 50, 100, (0, 333333), (3, 2)),
  )
  def test_follows_its_length(
    self, steps, warmup, save, evaluate, log, heads, begins, values
  ):
    unset = {name: {"every": None} for name in ("checkpoint", "eval", "log")}
    run = tiny.llm_config(
      train={"steps": steps},
      optim={"warmup_steps": None, "warmup_share": 0.1},
      tune={"top_k_values": (3, 2)},
      **unset,
    )
    found = run.scheduled()
    self.assertEqual(found.optim.warmup_steps, warmup)
    sections = found.checkpoint, found.eval, found.log
    self.assertEqual([s.every for s in sections], [save, evaluate, log])
    self.assertEqual(found.log.heads, heads)
    self.assertEqual(found.tune.top_k_steps, begins)
    self.assertEqual(found.tune.top_k_values, values)
    self.assertEqual(found.scheduled(), found)

  def test_a_schedule_is_checked_once_epochs_are_steps(self):
    schedule = {"top_k_steps": (0, 2000), "top_k_values": (3, 2)}
    tiny.llm_config(train={"epochs": 3.0}, tune=schedule)
    with self.assertRaisesRegex(ValueError, "before train.steps=1000"):
      tiny.llm_config(train={"steps": 1000}, tune=schedule)

  def test_what_is_stated_stays(self):
    keys = "optim.warmup_steps=3 eval.every=0 log.every=7 log.heads=0"
    stated = parse.changed(_LLM, keys.split())
    self.assertEqual(stated.scheduled(), stated)
    self.assertEqual(_DIT.scheduled().sample.every, 0)


class ConfigTest(absltest.TestCase):
  def test_sections_of_the_family_are_attributes(self):
    self.assertEqual(_DIT.diffusion.steps, 500)
    self.assertEqual(list(_DIT.sections), ["diffusion", "sample"])
    with self.assertRaisesRegex(AttributeError, "'tuned', only .*'diffusion'"):
      _ = _DIT.tuned
    self.assertFalse(hasattr(_DIT, "classifier"))

  def test_copies_are_equal(self):
    other = pickle.loads(pickle.dumps(_DIT))
    self.assertEqual((other, hash(other)), (_DIT, hash(_DIT)))


class FormsTest(parameterized.TestCase):
  """ConfigDict, JSON and dicts of the same run."""

  @parameterized.parameters(*_RUNS)
  def test_round_trips(self, run):
    config = _RUNS[run]
    cfg = config_lib.to_config_dict(config)
    self.assertTrue(cfg.is_locked)
    self.assertEqual(config_lib.from_config_dict(cfg), config)
    stored = json.loads(config_lib.to_json(config))
    self.assertEqual(config_lib.from_config_dict(stored), config)
    self.assertCountEqual(stored, config.by_name())

  @parameterized.parameters(
    ({"data": {}}, "section model=None must have fields"),
    ({**_changed("model"), "optimizer": {}}, "'optimizer' for .*; known: .*'o"),
    ({**_changed("model"), "sample": {}}, "unknown config section 'sample'"),
    (_changed("model", family="resnet"), r"family=.*\('vit', 'dit', 'llm'"),
  )
  def test_sections_that_are_none_are_refused(self, cfg, words):
    with self.assertRaisesRegex(ValueError, words):
      config_lib.from_config_dict(cfg)

  @parameterized.parameters(
    ("vit", "data", "batch_size", 8.0, "must be of type int"),
    ("vit", "optim", "lr", "1e-3", "must be of type float"),
    ("vit", "optim", "no_decay", "*/bias", "must be a tuple"),
    ("vit", "eval", "use_ema", 1, "must be of type bool"),
    ("vit", "model", "image_size", (8, 8, 8), "must have 2 values"),
    ("vit", "model", "router", {"kinds": "none"},
     "unknown config key model.router.kinds; did you mean 'kind'?; known:"),
    ("llm", "model", "head_order", ((0, "1"),), "head_order[0][1]='1' must"),
    ("llm", "model", "rope", {"low_freq_factor": 9.0},
     "model.rope.low_freq_factor=9.0 must be above 0 and below"),
    *(
      ("llm", section, "xyz", 1, f"unknown config key {section}.xyz; known: [")
      for section in _LLM.by_name()
    ),
  )  # fmt: skip
  def test_keys_and_types_are_named(self, run, section, key, value, words):
    with self.assertRaisesRegex(ValueError, re.escape(words)) as caught:
      config_lib.from_config_dict(_changed(section, _RUNS[run], **{key: value}))
    self.assertIn(f"{section}.{key}", str(caught.exception))


class OverridesTest(absltest.TestCase):
  def test_only_the_named_field_changes_and_is_checked(self):
    change = functools.partial(config_lib.apply_overrides, section="model")
    changed = change(_VIT, top_k=(2,), router={"two_stage": False})
    changed = change(changed, router={"gate_form": "paper"})
    router = config_lib.RouterConfig(gate_form="paper", two_stage=False)
    self.assertEqual(changed.model.router, router)
    usual = dataclasses.asdict(config_lib.RouterConfig())
    self.assertEqual(change(changed, top_k=(1,), router=usual), _VIT)
    with self.assertRaisesRegex(ValueError, "top_k=4"):
      change(_VIT, top_k=(4,))

  def test_differing_fields_and_both_values_are_named(self):
    router = config_lib.RouterConfig("none")
    ours = dataclasses.replace(_VIT.model, num_classes=1000)
    theirs = dataclasses.replace(
      _VIT.model, top_k=(3,), num_classes=5, router=router
    )
    found = config_lib.differing_fields(ours, theirs, "model")
    expected = (
      "model.num_classes: 1000 here, 5 there",
      "model.router.kind: 'two_stage' here, 'none' there",
      "model.top_k: (1,) here, (3,) there",
    )
    self.assertEqual(tuple(found), expected)
