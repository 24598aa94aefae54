"""Held-out losses of diffusion: which noise and timestep an example gets."""

import types

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiffusionConfig
from moh_jax.evaluation import denoising
from moh_jax.evaluation.means import mean_metrics
from moh_jax.models.diffusion import make_process

_SHAPE, _EXAMPLES, _STEPS = (4, 4, 1), 22, 50
_DIFFUSION = DiffusionConfig(space="pixel", steps=_STEPS)
_RNG = np.random.RandomState(0)
_IMAGES = _RNG.uniform(-1, 1, (_EXAMPLES, *_SHAPE)).astype(np.float32)
_LABELS = _RNG.randint(0, 10, _EXAMPLES).astype(np.int32)


class _Guess(nn.Module):
  """Some function of everything it is told; learns the variance if asked."""

  learn_sigma: bool = True

  @nn.compact
  def __call__(self, x, t, labels):
    said = (t / _STEPS + 0.1 * labels).reshape(-1, 1, 1, 1)
    out = 0.5 * x + 0.2 * said
    if self.learn_sigma:
      out = jnp.concatenate([out, 0.3 * jnp.sin(x + said)], axis=-1)
    return out, types.SimpleNamespace(activated_share=jnp.float32(0.75))


class _Clock(nn.Module):
  """Predicts the timestep, as a share of the process."""

  @nn.compact
  def __call__(self, x, t, labels):
    out = jnp.broadcast_to((t / _STEPS).reshape(-1, 1, 1, 1), x.shape)
    return out, types.SimpleNamespace(activated_share=jnp.float32(1.0))


class _Nothing(nn.Module):
  """Predicts 0: its error is what it should have predicted, squared."""

  @nn.compact
  def __call__(self, x, t, labels):
    aux = types.SimpleNamespace(activated_share=jnp.float32(1.0))
    return jnp.zeros_like(x), aux


def _batches(size, order=None, filler=0.0):
  """Batches in some order, the last one filled up with masked examples."""
  order = np.arange(_EXAMPLES) if order is None else order
  missing = -len(order) % size
  index = np.concatenate([order, np.zeros(missing, int)]).astype(np.int32)
  mask = np.float32(np.arange(len(index)) < len(order))
  images = np.where(mask.reshape(-1, 1, 1, 1) > 0, _IMAGES[index], filler)
  for start in range(0, len(index), size):
    part = slice(start, start + size)
    yield {
      "image": images[part].astype(np.float32),
      "label": _LABELS[index[part]],
      "index": index[part],
      "mask": mask[part],
    }


def _blank(index):
  """A batch of one empty image."""
  return {
    "image": np.zeros((1, *_SHAPE), np.float32),
    "label": np.int32([0]),
    "index": np.int32([index]),
    "mask": np.ones(1, np.float32),
  }


def _metrics(batches, model=None, diffusion=_DIFFUSION):
  step = denoising.make_eval_step(model or _Guess(), diffusion)
  return mean_metrics(step, {}, batches)


class DenoisingTest(parameterized.TestCase):
  def _assert_close(self, ours, theirs):
    self.assertEqual(ours.keys(), theirs.keys())
    for name, value in ours.items():
      np.testing.assert_allclose(value, theirs[name], rtol=2e-6, err_msg=name)

  @parameterized.parameters(1, 5, 22, 32)
  def test_batch_size_changes_no_figure(self, size):
    self._assert_close(_metrics(_batches(size)), _metrics(_batches(8)))

  def test_order_changes_no_figure(self):
    shuffled = np.random.RandomState(1).permutation(_EXAMPLES)
    self._assert_close(_metrics(_batches(8, shuffled)), _metrics(_batches(8)))

  def test_two_evaluations_are_equal(self):
    self.assertEqual(_metrics(_batches(8)), _metrics(_batches(8)))

  def test_padding_counts_nothing(self):
    metrics = _metrics(_batches(8))
    self.assertEqual(metrics["examples"], _EXAMPLES)
    self.assertEqual(metrics, _metrics(_batches(8, filler=50.0)))

  @parameterized.parameters(0.0, 0.25, 1.0)
  def test_loss_is_error_plus_weighted_bound(self, weight):
    diffusion = DiffusionConfig(space="pixel", steps=_STEPS, vb_weight=weight)
    metrics = _metrics(_batches(8), diffusion=diffusion)
    self.assertEqual(
      metrics.keys(), {"loss", "mse", "vb", "activated_share", "examples"}
    )
    self.assertAlmostEqual(
      metrics["loss"], metrics["mse"] + weight * metrics["vb"], places=4
    )
    self.assertEqual(metrics["activated_share"], 0.75)

  def test_weight_of_the_error_changes_the_loss_alone(self):
    diffusion = DiffusionConfig(
      space="pixel", steps=_STEPS, loss_weight="min_snr"
    )
    weighted = _metrics(_batches(8), diffusion=diffusion)
    plain = _metrics(_batches(8))
    self.assertAlmostEqual(weighted["mse"], plain["mse"], places=5)
    self.assertGreater(abs(weighted["loss"] - plain["loss"]), 0.05)

  def test_bound_is_missing_without_a_learned_variance(self):
    metrics = _metrics(_batches(8), _Guess(learn_sigma=False))
    self.assertNotIn("vb", metrics)
    self.assertAlmostEqual(metrics["loss"], metrics["mse"], places=6)

  def test_timesteps_spread_evenly_over_the_process(self):
    # The squared error of a prediction of 0 is then the timestep's square.
    diffusion = DiffusionConfig(space="pixel", steps=_STEPS, prediction="x0")
    step = denoising.make_eval_step(_Clock(), diffusion)
    errors = [step({}, _blank(index))["mse"] for index in range(100)]
    timesteps = np.round(_STEPS * np.sqrt(errors))
    counts, _ = np.histogram(timesteps, bins=10, range=(0, _STEPS))
    self.assertBetween(counts.min(), 9, counts.max())
    self.assertLessEqual(counts.max(), 11)
    self.assertBetween(min(timesteps), 0, 1)
    self.assertBetween(max(timesteps), _STEPS - 2, _STEPS - 1)

  def test_every_example_has_its_own_noise(self):
    step = denoising.make_eval_step(_Nothing(), _DIFFUSION)
    errors = {float(step({}, _blank(index))["mse"]) for index in range(8)}
    self.assertLen(errors, 8)

  def test_mean_error_of_no_prediction_is_the_noises_variance(self):
    metrics = _metrics(_batches(8), _Nothing())
    self.assertAlmostEqual(metrics["mse"], 1.0, delta=0.25)

  def test_error_is_that_of_the_noised_example(self):
    class Perfect(nn.Module):
      """Knows that the clean example is all ones."""

      @nn.compact
      def __call__(self, x, t, labels):
        levels = make_process("linear", _STEPS).alphas_cumprod
        level = jnp.float32(levels)[t].reshape(-1, 1, 1, 1)
        noise = (x - jnp.sqrt(level)) / jnp.sqrt(1 - level)
        aux = types.SimpleNamespace(activated_share=jnp.float32(1.0))
        return noise, aux

    ones = {"image": np.ones((8, *_SHAPE), np.float32)}
    metrics = _metrics([{**b, **ones} for b in _batches(8)], Perfect())
    self.assertLess(metrics["mse"], 1e-6)


if __name__ == "__main__":
  absltest.main()
