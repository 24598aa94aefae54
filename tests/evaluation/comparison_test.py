"""Spreads over seeds, differences by seed, and what diverged."""

import math
import re
import statistics

from absl.testing import absltest

from moh_jax.evaluation import comparison


def _seeds(*losses, share=1.0):
  """Metrics by seed; a loss of None is of a run that ended early."""
  return {
    seed: {"loss": loss, "accuracy": 1 - loss, "activated_share": share}
    if loss is not None
    else {}
    for seed, loss in enumerate(losses)
  }


def _compare(results, metrics=("loss",), **costs):
  """The rows of "VARIANT SETTING" -> seeds, and the lines of their table.

  Its columns are as wide as their longest cell; here cells are not filled up.
  """
  results = {tuple(f"{k} ".split(" ")[:2]): v for k, v in results.items()}
  plain = {"parameters": 1000, "step_flops": 2e9}
  plain |= {"step_seconds": 0.5, "step_spread": 0.0}
  costs = {key: plain | costs.get(key[0], {}) for key in results}
  rows = comparison.summarize(results, metrics, costs)
  table, meaning = comparison.to_markdown(rows).split("\n\n")
  lines, better = table.splitlines(), "more" if "acc" in metrics[0] else "less"
  assert len(set(map(len, lines))) == 1, table
  assert meaning.startswith(f"{metrics[0]}: {better} is better"), meaning
  return rows, [re.sub(" +", " ", line) for line in lines]


class ComparisonTest(absltest.TestCase):
  def test_differences_are_between_runs_of_one_seed(self):
    results = {
      "mha": _seeds(0.5, 0.7, 0.6),
      "moh50": _seeds(0.4, 0.65, 0.65, share=0.5),
    }
    (first, second), _ = _compare(results)
    self.assertEqual(first.difference.mean, 0)
    for spread, values in (
      (second.metrics["loss"], [0.4, 0.65, 0.65]),
      (second.difference, [-0.1, -0.05, 0.05]),
    ):
      self.assertAlmostEqual(spread.mean, statistics.mean(values))
      self.assertAlmostEqual(spread.deviation, statistics.stdev(values))
    self.assertEqual((second.better, second.activated_share), (2, 0.5))
    (_, second), _ = _compare(results, ["accuracy"])
    self.assertEqual(second.better, 2)  # higher is better here

  def test_the_best_setting_of_the_first_variant_is_the_baseline(self):
    rows, lines = _compare(
      {
        "mha optim.lr=1": _seeds(0.9, 0.8),
        "mha optim.lr=2": _seeds(0.5, 0.6),
        "moh50 optim.lr=1": _seeds(0.4, 0.5, share=0.5),
        "moh50 optim.lr=2": _seeds(0.6, 0.7, share=0.5),
      }
    )
    self.assertEqual([row.best for row in rows], [False, True, True, False])
    self.assertAlmostEqual(rows[2].difference.mean, -0.1)
    self.assertLen(lines, 6)
    self.assertIn("| **2** | 0.5500 ± 0.0707 | | | 100.0% | 1,000", lines[3])
    self.assertIn("| **1** |", lines[4])
    self.assertIn("| -0.1000 ± 0.0000 | 2 of 2 | 50.0% |", lines[4])

  def test_one_seed_has_no_spread_and_costs_are_ratios(self):
    half = {"step_flops": 1e9, "step_spread": 0.04}
    results = {"mha": _seeds(0.5), "moh50": _seeds(0.4)}
    results["config"] = _seeds(None, 0.3)  # no seed in common
    _, (_, _, _, last, apart) = _compare(results, moh50=half)
    self.assertStartsWith(last, "| moh50 | 0.4000 ")
    self.assertIn("| -0.1000 | 1 of 1 |", last)
    self.assertEndsWith(last, "| 0.50 | 1.00 ± 0.02 |")
    self.assertIn("| 0.3000 (1 of 2 diverged) | - | - |", apart)

  def test_a_stable_setting_is_preferred_to_one_that_diverged(self):
    rows, lines = _compare(
      {
        "mha lr=1": _seeds(0.5, 0.6, 0.7),
        "mha lr=9": _seeds(0.1, None, None),
        "moh50 lr=1": _seeds(0.4, 0.9, math.inf),
        "moh50 lr=9": _seeds(None, None, 0.1),
        "moh25 lr=1": _seeds(math.nan, None, None),
      }
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
    (legend,) = comparison.plot(rows).legends
    self.assertLen(legend.get_texts(), 2)

  def test_metrics(self):
    found = {("mha", ""): _seeds(0.5, None), ("config", ""): _seeds(0.6)}
    choose = comparison.choose_metrics
    self.assertEqual(choose(found, []), ["accuracy", "loss"])
    self.assertEqual(choose(found, ["loss"]), ["loss"])
    self.assertEqual(choose({("mha", ""): _seeds(None)}, []), ["loss"])
    with self.assertRaisesRegex(ValueError, "'fid' must be one of accuracy"):
      choose(found, ["fid"])
