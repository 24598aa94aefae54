"""Sums over held-out batches.

Any batches, orders, padding and devices give the same.
"""

import functools
import types

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiffusionConfig, MeshConfig
from moh_jax.data import sequences
from moh_jax.evaluation import metrics
from moh_jax.evaluation.metrics import mean_metrics
from moh_jax.models.diffusion import make_process
from moh_jax.models.registry import make_model
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training import classification
from moh_jax.training.task import held_out_batches
from tests.training import tiny

_VALUES = np.float32([1, 2, 3, 10, 20, 30, -4])
_RNG = np.random.RandomState(0)


def _batches(size=8, order=None, filler=0.0, **arrays):
  """Batches of examples in some order, the last one filled up and masked."""
  count = len(next(iter(arrays.values())))
  order = np.arange(count) if order is None else order
  places = np.pad(order, (0, -count % size))
  mask = np.float32(np.arange(len(places)) < count)
  for start in range(0, len(places), size):
    part, real = places[start : start + size], mask[start : start + size]
    batch = {name: x[part] for name, x in arrays.items()}
    for x in batch.values():
      x[real == 0] = filler
    yield batch | {"mask": real}


def _step(params, batch):
  """Sums of the values and of their squares, times the parameter."""
  value = batch["value"] * params
  return metrics.batch_sums(batch["mask"], value=value, square=value**2)


class MeanMetricsTest(parameterized.TestCase):
  @parameterized.parameters((1, 0.0), (3, 1e6), (7, 0.0), (16, 1e6))
  def test_are_means_over_the_examples_in_any_batches(self, size, filler):
    batches = _batches(size, filler=filler, value=_VALUES)
    found = mean_metrics(_step, 2.0, batches)
    mean, square = _VALUES.mean(), np.square(_VALUES).mean()
    expected = {"value": 2 * mean, "square": 4 * square, "examples": 7}
    chex.assert_trees_all_close(found, expected, atol=5e-5, rtol=0)
    self.assertIsInstance(found["examples"], int)
    self.assertIsInstance(found["value"], float)

  def test_are_summed_in_double_precision(self):
    ones = np.float32([2**25, 1, 1, 1, 1])  # 2**25 + 1 is no float32
    found = mean_metrics(_step, 1.0, _batches(1, value=ones))
    self.assertEqual(found["value"], (2**25 + 4) / 5)

  def test_empty_split_is_refused(self):
    with self.assertRaisesRegex(ValueError, "split to evaluate is empty"):
      next(held_out_batches(_CONFIG, [], None))


_CONFIG = tiny.llm_config()
_SIZE = 4


@functools.cache
def _language_step():
  return metrics.language_step(make_model(_CONFIG)[0], _CONFIG.model)


def _text_batch(real=_SIZE):
  """Packed sequences, those beyond the first `real` as padding fills them."""
  held_out = sequences.Text(_CONFIG.data, _CONFIG.model.vocab_size, "val")
  batch = tiny.stacked(held_out, _SIZE)
  for x in batch.values():
    x[real:] = 0
  return batch | {"mask": np.float32(np.arange(_SIZE) < real)}


def _sums(params, batch):
  return {n: float(x) for n, x in _language_step()(params, batch).items()}


class LanguageTest(absltest.TestCase):
  def test_sums_equal_those_of_all_logits(self):
    batch, params = _text_batch(), tiny.random_params(_CONFIG)
    net, _ = make_model(_CONFIG)
    log_probs, _ = tiny.all_log_probs(net, params, batch)
    targets, weights = batch["targets"], batch["weights"]
    picked = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    sums = _sums(params, batch)
    nats = -(picked * weights).sum()
    hits = ((log_probs.argmax(-1) == targets) * weights).sum()
    self.assertAlmostEqual(sums["nats"] / nats, 1, places=5)
    self.assertEqual(sums["correct"], hits)

  def test_padding_counts_nothing(self):
    params = tiny.random_params(_CONFIG)
    whole, without = _text_batch(), _text_batch()
    for name in ("weights", "mask"):
      without[name][3:] = 0
    sums, expected = _sums(params, _text_batch(real=3)), _sums(params, without)
    chex.assert_trees_all_close(sums, expected, rtol=1e-5)
    self.assertEqual(sums["examples"], 3)
    # The end of a split: tokens of segment 0 at the end of a sequence.
    for name in ("inputs", "targets", "segments", "positions", "weights"):
      whole[name][-1, 9:] = 0
    other = {name: x.copy() for name, x in whole.items()}
    other["inputs"][-1, 9:] = 7
    other["targets"][-1, 9:] = 8
    self.assertEqual(_sums(params, whole), _sums(params, other))
    self.assertEqual(_sums(params, whole)["tokens"], whole["weights"].sum())


_STEPS, _EXAMPLES, _SHAPE = 50, 22, (4, 4, 2)
_IMAGES = _RNG.normal(size=(_EXAMPLES, *_SHAPE)).astype(np.float32)
_LABELS = _RNG.randint(0, 10, _EXAMPLES).astype(np.int32)
_INDEX = np.arange(_EXAMPLES, dtype=np.int32)


class _Guess(nn.Module):
  """Some function of everything that it is told."""

  @nn.compact
  def __call__(self, x, t, labels):
    said = (t / _STEPS + 0.1 * labels).reshape(-1, 1, 1, 1)
    mean, spread = 0.5 * x + 0.2 * said, 0.3 * jnp.sin(x + said)
    out = jnp.concatenate([mean, spread], axis=-1)
    return out, types.SimpleNamespace(activated_share=jnp.float32(0.75))


def _denoised(**how):
  """Metrics of all examples, in batches as `_batches` makes them."""
  diffusion = DiffusionConfig(space="pixel", steps=_STEPS)
  arrays = {"image": _IMAGES, "label": _LABELS, "index": _INDEX}
  step = metrics.denoising_step(_Guess(), diffusion)
  return mean_metrics(step, {}, _batches(**how, **arrays))


class DenoisingTest(parameterized.TestCase):
  @parameterized.parameters(
    {"size": 5}, {"size": 32, "filler": 50}, {"order": _INDEX[::-1]}
  )
  def test_batches_order_and_padding_change_no_figure(self, **how):
    ours, theirs = _denoised(**how), _denoised()
    self.assertContainsSubset({"loss", "mse", "vb"}, ours)
    chex.assert_trees_all_close(ours, theirs, rtol=2e-6)
    self.assertEqual(ours["examples"], _EXAMPLES)
    self.assertEqual(ours["activated_share"], 0.75)

  def test_timesteps_spread_evenly_and_noises_differ(self):
    index = np.arange(100, dtype=np.int32)
    t, noise = metrics.noise_of_index(index, _SHAPE, _STEPS)
    counts = np.bincount(np.asarray(t) // 5, minlength=10)
    self.assertBetween(counts.min(), 9, counts.max())
    self.assertLessEqual(counts.max(), 11)
    self.assertLen({x.tobytes() for x in np.asarray(noise)}, 100)

  def test_error_is_that_of_the_noise_in_the_noised_example(self):
    t, noise = map(np.asarray, metrics.noise_of_index(_INDEX, _SHAPE, _STEPS))
    level = make_process("linear", _STEPS).alphas_cumprod[t]
    said = t / _STEPS + 0.1 * _LABELS
    level, said = (x.reshape(-1, 1, 1, 1) for x in (level, said))
    x = np.sqrt(level) * _IMAGES + np.sqrt(1 - level) * noise
    errors = np.square(0.5 * x + 0.2 * said - noise)
    self.assertAlmostEqual(_denoised()["mse"], errors.mean(), places=5)


class _Echo(nn.Module):
  """The "images" are the logits."""

  @nn.compact
  def __call__(self, images):
    return images, types.SimpleNamespace(activated_share=jnp.float32(0.5))


def _scores(logits, labels):
  batches = _batches(image=logits, label=labels)
  return mean_metrics(metrics.classification_step(_Echo()), {}, batches)


class ClassificationTest(parameterized.TestCase):
  def test_equals_the_definition(self):
    logits = _RNG.normal(size=(21, 8)).astype(np.float32)
    labels = _RNG.randint(0, 8, 21).astype(np.int32)
    hits = np.argsort(-logits, axis=-1) == labels[:, None]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = {
      "accuracy": hits[:, 0].mean(),
      "top5_accuracy": hits[:, :5].any(-1).mean(),
      "loss": -logp[np.arange(21), labels].mean(),
      "activated_share": 0.5,
      "examples": 21,
    }
    found = _scores(logits, labels)
    chex.assert_trees_all_close(found, expected, atol=5e-6, rtol=0)

  @parameterized.parameters((5, 0), (8, 1), (8, slice(None)))
  def test_model_that_gives_nan_scores_nothing(self, classes, place):
    logits = np.zeros((24, classes), np.float32)
    logits[:, place] = np.nan
    found = _scores(logits, np.arange(24, dtype=np.int32) % classes)
    self.assertEqual(found["accuracy"], 0)
    self.assertEqual(found.get("top5_accuracy"), 0 if classes > 5 else None)

  def test_any_number_of_devices_counts_the_same_images(self):
    config = tiny.config(model=tiny.ALIKE["vit"], eval={"batch_size": 16})
    model, _ = make_model(config)
    params = tiny.random_params(config)
    evaluate = classification.make_evaluate(model, config, Metadata(config))
    found = []
    for count in (1, 8):
      mesh = make_mesh(MeshConfig(), jax.devices()[:count])
      with use_mesh(mesh):
        found.append(evaluate(params, mesh))
    chex.assert_trees_all_close(*found, rtol=1e-5)
    self.assertEqual(found[0]["examples"] % 8, 7)  # the last batch is filled
