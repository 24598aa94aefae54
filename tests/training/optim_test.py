import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import traverse_util

from moh_jax.config import OptimConfig, ViTConfig
from moh_jax.convert import rules
from moh_jax.convert import vit as convert_vit
from moh_jax.models.vit import ViT
from moh_jax.runtime.sharding import abstract_params, unbox
from moh_jax.runtime.steps import load_config
from moh_jax.training import optim

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_MODEL = ViTConfig(
  image_size=(8, 8),
  channels=1,
  num_classes=10,
  patch_stride=2,
  embed_dims=(8, 16),
  depths=(1, 2),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),  # a pooled and a full stage
)
_KEYWORDS = ("query_embedding", "relative_pos_bias_local", "cpb", "temperature")


def _no_decay(name):
  return load_config(str(_ROOT / "configs" / name)).optim.no_decay


def _vit_params():
  inputs = (jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32),)
  return unbox(abstract_params(ViT(_MODEL), inputs))


def _release_decays(name, array):
  """The rule of the public release's optimizer, on its parameter names."""
  exempt = array.ndim == 1 or name.endswith(".bias")
  return not (exempt or any(keyword in name for keyword in _KEYWORDS))


def _adamw(params, grads, config, lrs):
  """AdamW after clipping (arXiv:1711.05101, algorithm 2), in float64."""
  params = {name: np.float64(x) for name, x in params.items()}
  m = {name: np.zeros_like(x) for name, x in params.items()}
  v = {name: np.zeros_like(x) for name, x in params.items()}
  for t, (grad, lr) in enumerate(zip(grads, lrs), 1):
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in grad.values()))
    scale = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
    for name, g in grad.items():
      g = np.float64(g) * scale
      m[name] = config.b1 * m[name] + (1 - config.b1) * g
      v[name] = config.b2 * v[name] + (1 - config.b2) * g**2
      update = (m[name] / (1 - config.b1**t)) / (
        np.sqrt(v[name] / (1 - config.b2**t)) + config.eps
      )
      decay = 0 if name == "bias" else config.weight_decay * params[name]
      params[name] = params[name] - lr * (update + decay)
  return params


def _run(params, grads, config, steps=100):
  optimizer = optim.make_optimizer(config, steps)
  state = optimizer.init(params)
  for grad in grads:
    updates, state = optimizer.update(grad, state, params)
    params = optax.apply_updates(params, updates)
  return params


def _params():
  rng = np.random.RandomState(0)
  return {
    "kernel": jnp.array(rng.normal(size=(3, 4)), jnp.float32),
    "bias": jnp.array(rng.normal(size=4), jnp.float32),
  }


def _grads(scales):
  rng = np.random.RandomState(1)
  return [
    {
      "kernel": jnp.array(rng.normal(size=(3, 4)) * scale, jnp.float32),
      "bias": jnp.array(rng.normal(size=4) * scale, jnp.float32),
    }
    for scale in scales
  ]


class ScheduleTest(parameterized.TestCase):
  def test_starts_peaks_and_ends_as_configured(self):
    config = OptimConfig(
      lr=1e-2, warmup_steps=10, warmup_lr=1e-4, final_lr=1e-3
    )
    schedule = optim.make_schedule(config, 100)
    values = [float(schedule(step)) for step in (0, 10, 100)]
    np.testing.assert_allclose(values, [1e-4, 1e-2, 1e-3], rtol=1e-5)

  def test_warmup_is_linear(self):
    config = OptimConfig(lr=1.0, warmup_steps=4, warmup_lr=0.2)
    schedule = optim.make_schedule(config, 10)
    values = [float(schedule(step)) for step in range(5)]
    np.testing.assert_allclose(values, [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)

  def test_cosine_between_peak_and_end(self):
    config = OptimConfig(lr=1.0, warmup_steps=20, final_lr=0.2)
    schedule = optim.make_schedule(config, 120)
    values = [float(schedule(step)) for step in (45, 70, 95)]
    angles = np.pi * np.array([0.25, 0.5, 0.75])
    expected = 0.2 + 0.8 * (1 + np.cos(angles)) / 2
    np.testing.assert_allclose(values, expected, rtol=1e-5)

  def test_stays_at_the_end(self):
    config = OptimConfig(lr=1.0, final_lr=0.2)
    schedule = optim.make_schedule(config, 10)
    np.testing.assert_allclose(float(schedule(500)), 0.2, rtol=1e-6)

  def test_no_warmup_starts_at_the_peak(self):
    config = OptimConfig(lr=0.5, warmup_lr=1e-6)
    schedule = optim.make_schedule(config, 10)
    self.assertEqual(float(schedule(0)), 0.5)
    self.assertLess(float(schedule(1)), 0.5)

  def test_constant_stays_at_the_peak(self):
    config = OptimConfig(lr=0.5, schedule="constant", warmup_steps=2)
    schedule = optim.make_schedule(config, 10)
    values = [float(schedule(step)) for step in (0, 1, 2, 9, 99)]
    np.testing.assert_allclose(values, [0, 0.25, 0.5, 0.5, 0.5], rtol=1e-6)

  @parameterized.parameters(
    ("linear", [1.0, 1.0, 0.6, 0.2]),
    ("cosine", [1.0, 1.0, 0.6, 0.2]),
    ("sqrt", [1.0, 1.0, 1 - 0.8 * 0.5**0.5, 0.2]),
  )
  def test_wsd_stays_and_falls_at_the_end(self, form, expected):
    config = OptimConfig(
      lr=1.0, schedule="wsd", warmup_steps=10, final_lr=0.2, decay_steps=20,
      decay_form=form,
    )  # fmt: skip
    schedule = optim.make_schedule(config, 100)
    values = [float(schedule(step)) for step in (10, 80, 90, 100)]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    self.assertEqual(float(schedule(5)), 0.5)
    np.testing.assert_allclose(float(schedule(500)), 0.2, rtol=1e-6)

  def test_wsd_of_a_longer_run_is_the_same_before_its_fall(self):
    config = OptimConfig(schedule="wsd", warmup_steps=10)
    short, long = (optim.make_schedule(config, n) for n in (100, 200))
    values = [[float(s(step)) for step in range(81)] for s in (short, long)]
    self.assertEqual(*values)
    self.assertLess(float(short(81)), float(long(81)))

  @parameterized.parameters(
    {"lr": 0.0},
    {"lr": 0.1, "warmup_steps": 10},
    {"lr": 0.0, "schedule": "wsd", "decay_form": "cosine"},
    {"lr": 0.1, "final_lr": 0.2},
  )
  def test_unusual_ones_stay_finite(self, **fields):
    schedule = optim.make_schedule(OptimConfig(**fields), 10)
    values = [float(schedule(step)) for step in range(12)]
    self.assertTrue(np.isfinite(values).all())


class DecayMaskTest(parameterized.TestCase):
  @parameterized.parameters("vit.py:s80", "vit_digits.py")
  def test_is_the_public_releases_rule(self, spec):
    params = _vit_params()
    mask = optim.decay_mask(params, _no_decay(spec))
    filled = jax.tree.map(
      lambda leaf, decays: np.full(leaf.shape, decays), params, mask
    )
    public = rules.dump_params(convert_vit.model_rules(_MODEL), filled)
    self.assertGreater(len(public), 50)
    for name, array in public.items():
      self.assertEqual({bool(x) for x in np.unique(array)},
                       {_release_decays(name, array)}, name)  # fmt: skip

  @parameterized.parameters(
    ("stage1/blocks/attn/q/bias", False),
    ("stage1/blocks/norm1/bias", False),
    ("stage1/blocks/norm2/scale", False),
    ("stage2/patch_embed/norm/scale", False),
    ("head/bias", False),
    ("stage1/blocks/attn/query_scale/query_embedding", False),
    ("stage1/blocks/attn/query_scale/temperature", False),
    ("stage1/blocks/attn/relative_pos_bias_local", False),
    ("stage1/blocks/attn/cpb/fc1_kernel", False),
    ("stage2/blocks/attn/cpb/fc2/kernel", False),
    ("stage1/blocks/attn/q/kernel", True),
    ("stage2/blocks/attn/out/kernel", True),
    ("stage1/blocks/mlp/dwconv/kernel", True),
    ("stage1/blocks/attn/learnable_tokens", True),
    ("stage1/blocks/attn/learnable_bias", True),
    ("stage2/blocks/attn/router/shared", True),
    ("head/kernel", True),
  )
  def test_recipe_decays(self, path, decays):
    mask = optim.decay_mask(_vit_params(), _no_decay("vit.py:s80"))
    self.assertEqual(traverse_util.flatten_dict(mask, sep="/")[path], decays)

  def test_no_pattern_decays_everything(self):
    mask = optim.decay_mask(_params(), ())
    self.assertEqual(mask, {"kernel": True, "bias": True})

  def test_star_crosses_slashes(self):
    mask = optim.decay_mask({"a": {"b": {"c": 1}, "d": 2}}, ("a/*c",))
    self.assertEqual(mask, {"a": {"b": {"c": False}, "d": True}})


def _constant(**fields):
  return OptimConfig(lr=0.05, schedule="constant", warmup_steps=0, **fields)


class OptimizerTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 1.0)
  def test_zero_gradient_shrinks_only_what_decays(self, clip_norm):
    config = OptimConfig(
      lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5,
      clip_norm=clip_norm, no_decay=("bias",),
    )  # fmt: skip
    params = _params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    after = _run(params, [zeros], config)
    chex.assert_trees_all_close(
      after["kernel"], params["kernel"] * (1 - 0.1 * 0.5), rtol=1e-6
    )
    chex.assert_trees_all_equal(after["bias"], params["bias"])

  @parameterized.product(scales=((1.0,), (100.0, 0.1, 1.0)), clip=(0.0, 1.0))
  def test_steps_equal_the_reference(self, scales, clip):
    config = OptimConfig(
      lr=0.05, schedule="constant", warmup_steps=0, b1=0.8, b2=0.9, eps=1e-3,
      weight_decay=0.1, clip_norm=clip, no_decay=("bias",),
    )  # fmt: skip
    grads = _grads(scales)
    ours = _run(_params(), grads, config)
    theirs = _adamw(_params(), grads, config, [0.05] * len(grads))
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)

  def test_learning_rate_follows_the_schedule(self):
    config = OptimConfig(
      lr=0.05, warmup_steps=2, warmup_lr=0.01, no_decay=("bias",)
    )
    grads = _grads((1.0, 1.0, 1.0))
    ours = _run(_params(), grads, config, steps=4)
    lrs = [0.01, 0.03, 0.05]
    theirs = _adamw(_params(), grads, config, lrs)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)

  def test_clipping_tames_one_large_gradient(self):
    grads = _grads((1e4, 1.0, 1.0))
    config = OptimConfig(
      lr=0.05, schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    free = _run(_params(), grads, config)
    clipped = _run(
      _params(),
      grads,
      _constant(clip_norm=1.0),
    )
    gap = jnp.abs(free["kernel"] - clipped["kernel"]).max()
    self.assertGreater(gap, 1e-3)

  def test_small_gradients_are_not_clipped(self):
    grads = _grads((1e-3, 2e-3))
    free = OptimConfig(
      lr=0.05, schedule="constant", warmup_steps=0, clip_norm=0.0
    )
    clipped = OptimConfig(
      lr=0.05, schedule="constant", warmup_steps=0, clip_norm=1.0
    )
    chex.assert_trees_all_equal(
      _run(_params(), grads, free), _run(_params(), grads, clipped)
    )


if __name__ == "__main__":
  absltest.main()
