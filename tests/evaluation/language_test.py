"""Sums over one batch of packed sequences."""

import functools
import math

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data import sequences
from moh_jax.evaluation.language import make_eval_step
from moh_jax.evaluation.means import mean_metrics, sum_metrics
from moh_jax.models.registry import make_model
from tests.training import tiny

_CONFIG = tiny.llm_config()
_SIZE = 4


@functools.cache
def _eval_step():
  return make_eval_step(make_model(_CONFIG)[0], _CONFIG.model)


def _batch(real=_SIZE):
  """Packed sequences, those beyond the first `real` as padding fills them."""
  held_out = sequences.Text(_CONFIG.data, _CONFIG.model.vocab_size, "val")
  batch = jax.tree.map(
    lambda *x: np.stack(x), *[held_out[i] for i in range(_SIZE)]
  )
  there = np.arange(_SIZE) < real
  batch = {
    name: np.where(there.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
    for name, x in batch.items()
  }
  return batch | {"mask": np.float32(there)}


def _sums(params, batch):
  return {n: float(x) for n, x in _eval_step()(params, batch).items()}


def _random():
  return tiny.random_params(_CONFIG)


class EvalStepTest(parameterized.TestCase):
  def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(self):
    batch = _batch()
    zeros = jax.tree.map(np.zeros_like, _random())
    sums = _sums(zeros, batch)
    tokens = batch["weights"].sum()
    self.assertEqual(sums["tokens"], tokens)
    self.assertEqual(sums["correct"], tokens)  # ties go to the target
    self.assertAlmostEqual(sums["nats"] / (tokens * math.log(60)), 1, places=5)
    self.assertEqual(sums["examples"], _SIZE)
    self.assertAlmostEqual(sums["activated_share"], 0.75 * _SIZE, places=5)

  def test_sums_equal_those_of_all_logits(self):
    batch, params = _batch(), _random()
    logits, _ = jax.jit(make_model(_CONFIG)[0].apply)(
      {"params": params},
      batch["inputs"],
      positions=batch["positions"],
      segments=batch["segments"],
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    targets, weights = batch["targets"], batch["weights"]
    picked = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    sums = _sums(params, batch)
    self.assertAlmostEqual(
      sums["nats"] / -(picked * weights).sum(), 1, places=5
    )
    hits = ((log_probs.argmax(-1) == targets) * weights).sum()
    self.assertEqual(sums["correct"], hits)

  def test_padding_counts_nothing(self):
    params, whole, part = _random(), _batch(), _batch(real=3)
    without = {
      name: np.where(np.arange(_SIZE) == 3, 0, x.T).T
      for name, x in whole.items()
      if name in ("weights", "mask")
    }
    sums, expected = _sums(params, part), _sums(params, whole | without)
    self.assertEqual(sums["examples"], 3)
    for name in ("nats", "tokens", "correct"):
      self.assertAlmostEqual(sums[name], expected[name], places=3, msg=name)

  def test_padded_tokens_count_nothing(self):
    # The end of a split: tokens of segment 0 at the end of a sequence.
    params, batch = _random(), _batch()
    for name in ("inputs", "targets", "segments", "positions", "weights"):
      batch[name][-1, 9:] = 0
    other = {name: x.copy() for name, x in batch.items()}
    other["inputs"][-1, 9:] = 7
    other["targets"][-1, 9:] = 8
    self.assertEqual(_sums(params, batch), _sums(params, other))
    self.assertEqual(_sums(params, batch)["tokens"], batch["weights"].sum())

  def test_batches_add_up(self):
    params = _random()
    batches = [_batch(), _batch(real=3)]
    total = sum_metrics(_eval_step(), params, batches)
    parts = [_sums(params, batch) for batch in batches]
    for name, value in total.items():
      self.assertEqual(value, parts[0][name] + parts[1][name])
    means = mean_metrics(_eval_step(), params, batches)
    self.assertEqual(means["examples"], 7)
    self.assertAlmostEqual(means["tokens"], total["tokens"] / 7)


if __name__ == "__main__":
  absltest.main()
