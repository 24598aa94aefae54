import math
import statistics

from absl.testing import absltest

from moh_jax.evaluation import comparison

_COSTS = {
  "parameters": 1000,
  "step_flops": 2e9,
  "computed_flops": 2e9,
  "step_seconds": 0.5,
  "step_spread": 0.0,
}


def _seeds(*losses, share=1.0):
  return {
    seed: {"loss": loss, "accuracy": 1 - loss, "activated_share": share}
    for seed, loss in enumerate(losses)
  }


class ComparisonTest(absltest.TestCase):
  def test_differences_are_between_runs_of_one_seed(self):
    results = {
      ("mha", ""): _seeds(0.5, 0.7, 0.6),
      ("moh50", ""): _seeds(0.4, 0.65, 0.65, share=0.5),
    }
    costs = {key: _COSTS for key in results}
    first, second = comparison.summarize(results, 3, ["loss"], costs)
    self.assertEqual(first.difference.mean, 0)
    self.assertAlmostEqual(second.metrics["loss"].mean, 1.7 / 3)
    self.assertAlmostEqual(
      second.metrics["loss"].deviation, statistics.stdev([0.4, 0.65, 0.65])
    )
    self.assertAlmostEqual(second.difference.mean, -0.1 / 3)
    self.assertAlmostEqual(
      second.difference.deviation, statistics.stdev([-0.1, -0.05, 0.05])
    )
    self.assertEqual((second.better, second.activated_share), (2, 0.5))
    _, second = comparison.summarize(results, 3, ["accuracy"], costs)
    self.assertEqual(second.better, 2)  # higher is better here

  def test_the_best_setting_of_the_first_variant_is_the_baseline(self):
    results = {
      ("mha", "optim.lr=1"): _seeds(0.9, 0.8),
      ("mha", "optim.lr=2"): _seeds(0.5, 0.6),
      ("moh50", "optim.lr=1"): _seeds(0.4, 0.5, share=0.5),
      ("moh50", "optim.lr=2"): _seeds(0.6, 0.7, share=0.5),
    }
    costs = {key: _COSTS for key in results}
    rows = comparison.summarize(results, 2, ["loss"], costs)
    self.assertEqual([row.best for row in rows], [False, True, True, False])
    self.assertAlmostEqual(rows[2].difference.mean, -0.1)
    text = comparison.to_markdown(rows)
    lines = text.splitlines()
    self.assertLen(lines, 6)
    self.assertIn("| **2** | 0.5500 ± 0.0707 |  |  | 100.0% | 1,000", lines[3])
    self.assertIn("| **1** |", lines[4])
    self.assertIn("| -0.1000 ± 0.0000 | 2 of 2 | 50.0% |", lines[4])

  def test_needed_flops_stand_beside_those_that_are_computed(self):
    results = {("mha", ""): _seeds(0.5), ("moh50", ""): _seeds(0.5)}
    costs = {key: _COSTS for key in results}
    costs["moh50", ""] = _COSTS | {"step_flops": 1e9, "step_spread": 0.04}
    text = comparison.to_markdown(
      comparison.summarize(results, 1, ["loss"], costs)
    )
    header, _, _, last = text.splitlines()
    titles = "FLOPs needed | FLOPs computed | time of a step |"
    self.assertEndsWith(header, titles)
    self.assertEndsWith(last, "| 0.50 | 1.00 | 1.00 ± 0.02 |")

  def test_runs_that_ended_early_are_counted(self):
    results = {
      ("mha", ""): _seeds(0.5, 0.7),
      ("moh50", ""): {1: {"loss": 0.6, "accuracy": 0.4, "activated_share": 1}},
      ("moh25", ""): {},
    }
    costs = {key: _COSTS for key in results}
    rows = comparison.summarize(results, 2, ["loss"], costs)
    self.assertEqual([row.failed for row in rows], [0, 1, 2])
    self.assertAlmostEqual(rows[1].difference.mean, -0.1)
    self.assertTrue(math.isnan(rows[2].metrics["loss"].mean))
    lines = comparison.to_markdown(rows).splitlines()
    self.assertIn("(1 of 2 runs)", lines[3])
    self.assertNotIn("nan", lines[4])

  def test_a_stable_setting_is_preferred_to_one_that_diverged(self):
    def seeds(**losses):  # by seed; None is infinite
      return {
        int(seed[1:]): {"loss": loss, "activated_share": 1.0}
        for seed, loss in losses.items()
      }

    results = {
      ("mha", "lr=1"): seeds(s0=0.5, s1=0.6, s2=0.7),
      ("mha", "lr=9"): seeds(s0=0.1),
      ("moh50", "lr=1"): seeds(s0=0.4, s1=0.9, s2=None),
      ("moh50", "lr=9"): seeds(s2=0.1),
      ("moh25", "lr=1"): seeds(s0=None),
    }
    costs = {key: _COSTS for key in results}
    rows = comparison.summarize(results, 3, ["loss"], costs)
    self.assertEqual(
      [row.best for row in rows], [True, False, True, False, False]
    )
    self.assertEqual([row.failed for row in rows], [0, 2, 1, 2, 3])
    self.assertEqual(rows[2].metrics["loss"].values, (0.4, 0.9))
    text = comparison.to_markdown(rows)
    lines = text.splitlines()[2:]
    self.assertNotIn("nan", text)
    self.assertNotIn("inf", text)
    # Of the seeds that both have: a missing one is neither won nor lost.
    self.assertIn("| 1 of 1 |", lines[1])
    self.assertIn("| 1 of 2 |", lines[2])
    self.assertIn("| 1 of 1 |", lines[3])
    for line, count in zip(lines, (0, 2, 1, 2, 3)):
      self.assertEndsWith(line, f"| {count} of 3 |")
    (axis,) = comparison.plot(rows).axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    self.assertEqual(labels, ["mha lr=1", "moh50 lr=1 (1 of 3 diverged)"])

  def test_without_a_common_seed_there_is_no_difference(self):
    results = {("mha", ""): _seeds(0.5), ("config", ""): {1: _seeds(0.4)[0]}}
    costs = {key: _COSTS for key in results}
    rows = comparison.summarize(results, 2, ["loss"], costs)
    line = comparison.to_markdown(rows).splitlines()[-1]
    self.assertIn("| 0.4000 (1 of 2 runs) | - | - |", line)

  def test_one_seed_has_no_spread(self):
    results = {("mha", ""): _seeds(0.5), ("moh50", ""): _seeds(0.4)}
    costs = {key: _COSTS for key in results}
    text = comparison.to_markdown(
      comparison.summarize(results, 1, ["loss"], costs)
    )
    self.assertIn("| moh50 | 0.4000 | -0.1000 | 1 of 1 |", text)
    self.assertNotIn("±", text)

  def test_metrics(self):
    found = [_seeds(0.5), _seeds(0.6)]
    choose = comparison.choose_metrics
    self.assertEqual(choose(found, []), ["accuracy", "loss"])
    self.assertEqual(choose(found, ["loss"]), ["loss"])
    with self.assertRaisesRegex(ValueError, "'fid' .* every run has: accuracy"):
      choose(found, ["fid"])
    with self.assertRaisesRegex(ValueError, "there is none"):
      choose([{}], [])

  def test_the_plot_shows_the_best_settings(self):
    results = {
      ("mha", "optim.lr=1"): _seeds(0.9, 0.8),
      ("mha", "optim.lr=2"): _seeds(0.5, 0.6),
      ("moh50", "optim.lr=1"): _seeds(0.4, 0.5, share=0.5),
    }
    costs = {key: _COSTS for key in results}
    rows = comparison.summarize(results, 2, ["loss"], costs)
    (axis,) = comparison.plot(rows).axes
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    self.assertEqual(labels, ["mha optim.lr=2", "moh50 optim.lr=1"])
    self.assertEqual(axis.get_ylabel(), "loss")


if __name__ == "__main__":
  absltest.main()
