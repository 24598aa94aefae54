"""Spreads over seeds, differences by seed, and what diverged."""

import math
import statistics

from absl.testing import absltest

from moh_jax.evaluation import comparison


def _seeds(*losses, share=1.0):
  """Metrics by seed; a loss of None is of a run that ended early."""
  return {
    seed: {"loss": loss, "accuracy": 1 - loss, "activated_share": share}
    for seed, loss in enumerate(losses)
    if loss is not None
  }


def _compare(results, runs, metrics=("loss",), **costs):
  """The rows of "VARIANT SETTING" -> seeds, and the lines of their table."""
  results = {tuple(f"{k} ".split(" ")[:2]): v for k, v in results.items()}
  plain = {"parameters": 1000, "step_flops": 2e9}
  plain |= {"step_seconds": 0.5, "step_spread": 0.0}
  costs = {key: plain | costs.get(key[0], {}) for key in results}
  rows = comparison.summarize(results, runs, metrics, costs)
  return rows, comparison.to_markdown(rows).splitlines()


class ComparisonTest(absltest.TestCase):
  def test_differences_are_between_runs_of_one_seed(self):
    results = {
      "mha": _seeds(0.5, 0.7, 0.6),
      "moh50": _seeds(0.4, 0.65, 0.65, share=0.5),
    }
    (first, second), _ = _compare(results, 3)
    self.assertEqual(first.difference.mean, 0)
    for spread, values in (
      (second.metrics["loss"], [0.4, 0.65, 0.65]),
      (second.difference, [-0.1, -0.05, 0.05]),
    ):
      self.assertAlmostEqual(spread.mean, statistics.mean(values))
      self.assertAlmostEqual(spread.deviation, statistics.stdev(values))
    self.assertEqual((second.better, second.activated_share), (2, 0.5))
    (_, second), _ = _compare(results, 3, ["accuracy"])
    self.assertEqual(second.better, 2)  # higher is better here

  def test_the_best_setting_of_the_first_variant_is_the_baseline(self):
    rows, lines = _compare(
      {
        "mha optim.lr=1": _seeds(0.9, 0.8),
        "mha optim.lr=2": _seeds(0.5, 0.6),
        "moh50 optim.lr=1": _seeds(0.4, 0.5, share=0.5),
        "moh50 optim.lr=2": _seeds(0.6, 0.7, share=0.5),
      },
      2,
    )
    self.assertEqual([row.best for row in rows], [False, True, True, False])
    self.assertAlmostEqual(rows[2].difference.mean, -0.1)
    self.assertLen(lines, 6)
    self.assertIn("| **2** | 0.5500 ± 0.0707 |  |  | 100.0% | 1,000", lines[3])
    self.assertIn("| **1** |", lines[4])
    self.assertIn("| -0.1000 ± 0.0000 | 2 of 2 | 50.0% |", lines[4])

  def test_one_seed_has_no_spread_and_costs_are_ratios(self):
    half = {"step_flops": 1e9, "step_spread": 0.04}
    results = {"mha": _seeds(0.5), "moh50": _seeds(0.4)}
    results["config"] = _seeds(None, 0.3)  # no seed in common
    _, (_, _, _, last, apart) = _compare(results, 2, moh50=half)
    self.assertStartsWith(last, "| moh50 | 0.4000 ")
    self.assertIn("| -0.1000 | 1 of 1 |", last)
    self.assertEndsWith(last, "| 0.50 | 1.00 | 1.00 ± 0.02 |")
    self.assertIn("| 0.3000 (1 of 2 diverged) | - | - |", apart)

  def test_a_stable_setting_is_preferred_to_one_that_diverged(self):
    rows, lines = _compare(
      {
        "mha lr=1": _seeds(0.5, 0.6, 0.7),
        "mha lr=9": _seeds(0.1, None, None),
        "moh50 lr=1": _seeds(0.4, 0.9, math.inf),
        "moh50 lr=9": _seeds(None, None, 0.1),
        "moh25 lr=1": _seeds(math.nan),
      },
      3,
    )
    best = [row.best for row in rows]
    self.assertEqual(best, [True, False, True, False, False])
    self.assertEqual([row.failed for row in rows], [0, 2, 1, 2, 3])
    self.assertEqual(rows[2].metrics["loss"].values, (0.4, 0.9))
    self.assertTrue(math.isnan(rows[4].metrics["loss"].mean))
    self.assertNotRegex("".join(lines), "nan|inf")
    self.assertNotIn("diverged", lines[2])
    # Of the seeds that both have: a missing one is neither won nor lost.
    for line, wins, failed in zip(
      lines[3:], ("1 of 1", "1 of 2", "1 of 1", "-"), (2, 1, 2, 3)
    ):
      self.assertIn(f"| {wins} |", line)
      self.assertIn(f"({failed} of 3 diverged)", line)
    (axis,) = comparison.plot(rows).axes
    labels = [text.get_text() for text in axis.texts]
    self.assertEqual(labels, ["mha lr=1", "moh50 lr=1 (1 of 3 diverged)"])

  def test_names_stand_beside_their_means_and_apart(self):
    results = {
      "mha": _seeds(0.5, 0.7),
      "gate": _seeds(0.51, 0.7),
      "moh50": _seeds(0.59, 0.6, share=0.5),
    }
    (axis,) = comparison.plot(_compare(results, 2)[0]).axes
    places = {text.get_text(): text.xy for text in axis.texts}
    self.assertEqual(places["moh50"], (0.5, 0.595))
    self.assertEqual(places["mha"], (1.0, 0.6))
    share, height = places["gate"]  # its mean is 0.605: above the other name
    self.assertEqual(share, 1.0)
    self.assertGreater(height, 0.606)
    self.assertLess(height, 0.63)

  def test_metrics(self):
    found = [_seeds(0.5), _seeds(0.6)]
    choose = comparison.choose_metrics
    self.assertEqual(choose(found, []), ["accuracy", "loss"])
    self.assertEqual(choose(found, ["loss"]), ["loss"])
    for rows, names, message in (
      (found, ["fid"], "'fid' .* every run has: accuracy"),
      ([{}], [], "there is none"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        choose(rows, names)
