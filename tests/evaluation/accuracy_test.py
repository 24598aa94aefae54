import types

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation import accuracy
from moh_jax.evaluation.means import mean_metrics

_CLASSES, _BATCH = 8, 8
_RNG = np.random.RandomState(0)
_LOGITS = _RNG.normal(size=(20, _CLASSES)).astype(np.float32)
_LABELS = _RNG.randint(0, _CLASSES, 20).astype(np.int32)


class _Echo(nn.Module):
  """The "images" are the logits; half of the heads are active."""

  @nn.compact
  def __call__(self, images):
    return images, types.SimpleNamespace(activated_share=jnp.float32(0.5))


def _batches(logits=_LOGITS, labels=_LABELS, filler=0.0):
  """Batches of 8, the last one filled up with masked examples."""
  count = -(-len(labels) // _BATCH) * _BATCH
  images = np.full((count, _CLASSES), filler, np.float32)
  images[: len(labels)] = logits
  padded = np.zeros(count, np.int32)
  padded[: len(labels)] = labels
  mask = (np.arange(count) < len(labels)).astype(np.float32)
  for i in range(0, count, _BATCH):
    part = slice(i, i + _BATCH)
    yield {"image": images[part], "label": padded[part], "mask": mask[part]}


def _evaluate(batches):
  step = accuracy.make_eval_step(_Echo())
  return mean_metrics(step, {}, batches)


class AccuracyTest(parameterized.TestCase):
  def test_metrics_equal_the_reference(self):
    metrics = _evaluate(_batches())
    order = np.argsort(-_LOGITS, axis=-1)
    hits = order == _LABELS[:, None]
    logp = _LOGITS - np.log(np.exp(_LOGITS).sum(-1, keepdims=True))
    self.assertEqual(metrics["examples"], 20)
    self.assertAlmostEqual(metrics["accuracy"], hits[:, 0].mean(), places=6)
    top5 = hits[:, :5].any(-1).mean()
    self.assertAlmostEqual(metrics["top5_accuracy"], top5, places=6)
    loss = -logp[np.arange(20), _LABELS].mean()
    self.assertAlmostEqual(metrics["loss"], loss, places=5)
    self.assertAlmostEqual(metrics["activated_share"], 0.5, places=6)

  def test_padding_counts_nothing(self):
    plain, loud = _evaluate(_batches()), _evaluate(_batches(filler=50.0))
    self.assertEqual(plain, loud)

  @parameterized.parameters(0, 1)
  def test_right_and_wrong_answers(self, shift):
    logits = np.eye(_CLASSES, dtype=np.float32)[(_LABELS + shift) % _CLASSES]
    metrics = _evaluate(_batches(logits))
    self.assertEqual(metrics["accuracy"], 1.0 - shift)

  @parameterized.product(classes=(2, 4, 5, 8), place=(0, 1, slice(None)))
  def test_model_that_gives_nan_scores_nothing(self, classes, place):
    labels = np.arange(8, dtype=np.int32) % classes
    logits = np.zeros((8, classes), np.float32)
    logits[:, place] = np.nan
    batch = {"image": logits, "label": labels, "mask": np.ones(8, np.float32)}
    metrics = _evaluate([batch])
    self.assertEqual((metrics["accuracy"], metrics["top5_accuracy"]), (0, 0))

  @parameterized.parameters(0.0, np.nan)
  def test_logits_without_a_winner_are_not_right(self, value):
    labels = np.arange(_CLASSES, dtype=np.int32)
    logits = np.full((_CLASSES, _CLASSES), value, np.float32)
    metrics = _evaluate(_batches(logits, labels))
    self.assertLessEqual(metrics["accuracy"], 1 / _CLASSES)
    self.assertLessEqual(metrics["top5_accuracy"], 5 / _CLASSES)


if __name__ == "__main__":
  absltest.main()
