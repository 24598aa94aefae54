import json
import math
from unittest import mock

import pytest

from moh_jax.training import bench, variants
from moh_jax.training.bench import Timing
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import Result
from tests.cli import tiny_checkpoint


class CompareTest(tiny_checkpoint.CommandTest):
  COMMAND = "compare --seeds=1 --variants=mha,config,moh75"

  def call(self, *argv, train=None):
    """Runs the command with another `train`."""
    config = tiny_checkpoint.write_config(self.root, tiny_checkpoint.CONFIG)
    where = "--config", config, "--workdir", self.root / "runs"
    with mock.patch.object(variants, "train", train or _fake_train):
      return super().call(*where, *argv)

  def _rows(self, *argv):
    return self.report("--rounds=0", *argv)["rows"]

  @pytest.mark.integration
  def test_trains_as_train_does(self):
    argv = "--rounds=1", "--variants=config", "--json=-"
    out = self.call(*argv, train=variants.train)[1]
    (row,) = json.loads(out)["rows"]
    self.assertGreater(row["costs"]["step_seconds"], 0)
    lines = (self.root / "runs/config-seed0/metrics.jsonl").read_text()
    metrics = json.loads(lines.splitlines()[-1])
    for name, spread in row["metrics"].items():
      self.assertAlmostEqual(spread["mean"], metrics[name], places=5)

  def test_rows_and_a_plot(self):
    plot = self.root / "plot.png"
    rows = self._rows("--plot", plot)
    self.assertEqual([r["activated_share"] for r in rows], [1.0, 0.5, 0.75])
    self.assertEqual(plot.read_bytes()[1:4], b"PNG")
    mha, moh, _ = (row["costs"]["step_flops"] for row in rows)
    self.assertGreater(mha, moh)

  @pytest.mark.integration
  def test_runs_that_diverged_are_counted(self):
    def train(config, *args, **options):
      result = _fake_train(config, *args, **options)
      seed, share = config.train.seed, config.model.activated_share
      if seed == 2 or share == 0.75:
        raise NonFiniteLossError("at step 3: NaN, norm: Infinity")
      result.evaluation["perplexity"] = math.inf if seed else 9.0 - share
      return result

    argv = "--rounds=0", "--metrics=perplexity", "--seeds=3"
    status, out, err = self.call(*argv, train=train)
    self.assertEqual(status, 0)
    self.assertIn("mha-seed2: at step 3: NaN, norm: Infinity\n", err)
    self.assertRegex(out, r"\| mha +\| 8.0000 \(2 of 3 diverged\) +\|")

  def test_a_run_without_scores_has_not_diverged(self):
    train = mock.Mock(return_value=Result(None, {}, finished=True))
    status, _, err = self.call("--rounds=0", train=train)
    self.assertEqual(status, 2)
    self.assertIn("mha-seed0 has no scores: its data are without a", err)

  @pytest.mark.integration
  def test_each_program_is_timed(self):
    def seconds(programs, rounds):
      timed.append((len(programs), rounds))
      return {
        name: Timing(one.data.batch_size * one.model.activated_share, 0.0)
        for name, one in programs.items()
      }

    for sweep, programs, ratios in (
      ("data.batch_size=8,256", 4, [1, 32, 0.5, 16]),
      ("optim.lr=1e-4,1e-2", 2, [1, 1, 0.5, 0.5]),
    ):
      timed = []
      with mock.patch.object(bench, "step_seconds", seconds):
        out = self.done("--sweep", sweep, "--variants=mha,config", "--rounds=2")
      self.assertEqual(timed, [(programs, 2)])
      found = [
        float(line.split("|")[-2])
        for line in out.splitlines()[2:]
        if line.startswith("|")
      ]
      self.assertEqual(found, ratios)

  @pytest.mark.integration
  def test_a_stopped_run_goes_on(self):
    stopped = Result(state=None, evaluation={}, finished=False)
    train = mock.Mock(return_value=stopped)
    self.assertEqual(self.call(train=train)[:2], (143, ""))
    train.assert_called_once()
    self.assertLen(self._rows(), 3)


def _fake_train(config, workdir, **options):
  del workdir, options
  share = config.model.activated_share
  evaluation = {"accuracy": share, "loss": 1.0, "activated_share": share}
  return Result(state=None, evaluation=evaluation, finished=True)
