"""Schedules, steps of the optimizer, decay, rates by layer."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized
from flax import traverse_util

from moh_jax.config import OptimConfig
from moh_jax.convert import rules
from moh_jax.convert import vit as convert_vit
from moh_jax.models.registry import make_model
from moh_jax.runtime.parameters import abstract_params, unbox
from moh_jax.runtime.steps import load_config
from moh_jax.training import optim
from tests.training import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_KEYWORDS = ("query_embedding", "relative_pos_bias_local", "cpb", "temperature")


def _run(optimizer, grads):
  params = _random(0)
  state = optimizer.init(params)
  for grad in grads:
    updates, state = optimizer.update(grad, state, params)
    params = optax.apply_updates(params, updates)
  return params


def _random(seed, scale=1.0):
  rng = np.random.RandomState(seed)
  return {
    "kernel": jnp.array(rng.normal(size=(3, 4)) * scale, jnp.float32),
    "bias": jnp.array(rng.normal(size=4) * scale, jnp.float32),
  }


_WSD = {"schedule": "wsd", "lr": 1.0, "warmup_steps": 10, "final_lr": 0.2,
        "decay_steps": 20}  # fmt: skip
_COSINE = 0.2 + 0.8 * (1 + np.cos(np.pi * np.array([0.25, 0.5, 0.75]))) / 2


class ScheduleTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"lr": 1.0, "warmup_steps": 20, "warmup_lr": 0.2, "final_lr": 0.2}, 120,
     {0: 0.2, 5: 0.4, 20: 1.0, **dict(zip((45, 70, 95), _COSINE)), 500: 0.2}),
    ({"lr": 0.5, "warmup_lr": 1e-6}, 10, {0: 0.5, 5: 0.25}),
    ({"lr": 0.5, "schedule": "constant", "warmup_steps": 2}, 10,
     {0: 0, 1: 0.25, 2: 0.5, 9: 0.5, 99: 0.5}),
    (_WSD, 100, {5: 0.5, 10: 1.0, 80: 1.0, 90: 0.6, 100: 0.2, 500: 0.2}),
  )  # fmt: skip
  def test_rates_of_steps(self, fields, steps, expected):
    schedule = optim.make_schedule(OptimConfig(**fields), steps)
    found = [float(schedule(step)) for step in expected]
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-5)


class DecayMaskTest(parameterized.TestCase):
  def test_is_the_public_releases_rule(self):
    no_decay = load_config(f"{_ROOT}/configs/vit.py:s80").optim.no_decay
    params = unbox(abstract_params(*make_model(tiny.config())))
    mask = optim.decay_mask(params, no_decay)
    filled = jax.tree.map(
      lambda leaf, decays: np.full(leaf.shape, decays), params, mask
    )
    public = rules.dump_params(convert_vit.model_rules(tiny.MODEL), filled)
    self.assertGreater(len(public), 50)
    for name, array in public.items():
      kept = name.endswith(".bias") or any(k in name for k in _KEYWORDS)
      decays = array.ndim != 1 and not kept
      self.assertEqual({bool(x) for x in np.unique(array)}, {decays}, name)

  def test_star_crosses_slashes(self):
    mask = optim.decay_mask({"a": {"b": {"c": 1}, "d": 2}}, ("a/*c",))
    self.assertEqual(mask, {"a": {"b": {"c": False}, "d": True}})


class OptimizerTest(parameterized.TestCase):
  @parameterized.product(
    scales=((1e4, 1.0, 1.0), (1e-3, 2e-3)), clip=(0.0, 1.0)
  )
  def test_steps_are_those_of_adamw(self, scales, clip):
    config = OptimConfig(
      lr=0.05, warmup_steps=2, warmup_lr=0.01, b1=0.8, b2=0.9, eps=1e-3,
      weight_decay=0.1, clip_norm=clip, no_decay=("bias",),
    )  # fmt: skip
    grads = [_random(1 + i, scale) for i, scale in enumerate(scales)]
    ours = _run(optim.make_optimizer(config, 4), grads)
    rates = jnp.array([0.01, 0.03, 0.05])
    theirs = optax.chain(
      optax.clip_by_global_norm(clip) if clip else optax.identity(),
      optax.adamw(
        *(lambda step: rates[step], 0.8, 0.9, 1e-3),
        weight_decay=0.1,
        mask={"kernel": True, "bias": False},
      ),
    )
    theirs = _run(theirs, grads)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)

  def test_steps_are_those_of_adafactor(self):
    config = OptimConfig(
      name="adafactor", schedule="constant", lr=1.0, warmup_steps=0, b1=0.0,
      b2=0.5, weight_decay=0.0, clip_norm=0.0,
    )  # fmt: skip
    optimizer = optim.make_optimizer(config, 10)
    grads = [_random(i, scale) for i, scale in ((1, 1.0), (2, 9.0), (3, 0.1))]
    expected, second = _random(0)["bias"], 0.0
    for step, grad in enumerate(grads, start=1):
      # arXiv:1804.04235: 1 - t^-0.8, here at most b2; no update's root mean
      # square is above 1. A matrix below 128 x 128 is not factored.
      decay = min(0.5, 1 - step**-0.8)
      second = decay * second + (1 - decay) * jnp.square(grad["bias"])
      update = grad["bias"] / jnp.sqrt(second)
      update /= jnp.maximum(1.0, jnp.sqrt(jnp.square(update).mean()))
      expected -= update
    found = _run(optimizer, grads)["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)

  def test_steps_that_are_not_finite_are_skipped_and_counted(self):
    config = OptimConfig(skip_nonfinite=2, warmup_steps=0)
    optimizer = optim.make_optimizer(config, 9)
    params, state = _random(0), optimizer.init(_random(0))
    bad = jax.tree.map(lambda x: x * np.nan, params)
    for grad, count in ((bad, 1), (_random(1), 0), (bad, 1), (bad, 2)):
      updates, state = optimizer.update(grad, state, params)
      self.assertEqual(state.notfinite_count, count)
      self.assertEqual(any(map(np.any, updates.values())), not count)


# Halvings: none of the output, one more of each layer below.
_HALVINGS = {
  "vit": {  # of 1 and of 2 blocks
    "stage1/patch_embed/proj/kernel": [4],
    "stage1/blocks/norm1/scale": [3],
    "stage1/norm/scale": [3],
    "stage2/patch_embed/proj/kernel": [3],
    "stage2/blocks/norm1/scale": [2, 1],
    "stage2/norm/scale": [1],
    "head/kernel": [0],
  },
  "llm": {
    "embed/embedding": [3],
    "blocks0/mlp/up/kernel": [2, 1],
    "head/kernel": [0],
  },
}


class LayerDecayTest(parameterized.TestCase):
  @parameterized.parameters(*_HALVINGS)
  @pytest.mark.integration
  def test_multiplies_the_updates_and_keeps_the_state(self, family):
    config = tiny.CONFIGS[family]()
    params, plain = tiny.random_params(config), optax.sgd(0.1)
    scaled = optim.decay_by_layer(plain, 0.5, config.model)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(scaled.update)(grads, scaled.init(params), params)
    chex.assert_trees_all_equal_structs(state, plain.init(params))
    updates = traverse_util.flatten_dict(updates, sep="/")
    for name, halvings in _HALVINGS[family].items():
      rows = np.asarray(updates[name]).reshape(len(halvings), -1)
      for row, times in zip(rows, halvings):
        np.testing.assert_allclose(row, -0.1 * 0.5**times, rtol=1e-6)
