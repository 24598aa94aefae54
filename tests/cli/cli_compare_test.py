import dataclasses
import json
import math
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from moh_jax import config as config_lib
from moh_jax.training import bench, comparison
from moh_jax.training.bench import Timing
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import Result
from tests.cli import tiny_checkpoint


class CompareCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self._write_config(tiny_checkpoint.CONFIG)

  def _write_config(self, config):
    values = config_lib.to_config_dict(config).to_dict()
    self.config = self.root / "config.py"
    self.config.write_text(f"def get_config():\n  return {values!r}\n")

  def _compare(self, *argv, seeds=1):
    return tiny_checkpoint.call(
      *("compare", "--config", self.config, "--workdir", self.root / "runs"),
      *("--variants", "mha,config,moh75", "--seeds", seeds, *argv),
    )

  def _rows(self, *argv, seeds=1):
    status, out, err = self._compare(
      "--rounds", 0, "--json", "-", *argv, seeds=seeds
    )
    self.assertEqual(status, 0, err)
    return json.loads(out)["rows"]

  def test_trains_as_train_does(self):
    argv = "--variants", "config", "--json", self.root / "rows.json"
    status, out, err = self._compare("--rounds", 1, *argv)
    self.assertEqual(status, 0, err)
    result = json.loads((self.root / "rows.json").read_text())
    self.assertIn("commit", result["machine"])
    (row,) = result["rows"]
    self.assertGreater(row["costs"]["step_seconds"], 0)
    self.assertIn("| time of a step |", out)

    status, out, err = tiny_checkpoint.call(
      *("evaluate", "--checkpoint", self.root / "runs" / "config-seed0"),
      *("--json", "-"),
    )
    self.assertEqual(status, 0, err)
    metrics = json.loads(out)
    self.assertEqual(row["activated_share"], metrics["activated_share"])
    for name, spread in row["metrics"].items():
      self.assertAlmostEqual(spread["mean"], metrics[name], places=5)

  def test_trains_only_what_has_no_result(self):
    plot = self.root / "plot.png"
    with mock.patch.object(
      comparison, "train", side_effect=_fake_train
    ) as train:
      rows = self._rows("--plot", plot)
      self.assertEqual(train.call_count, 3)
      self.assertEqual(rows, self._rows())
      self.assertEqual(train.call_count, 3)
      self._rows(seeds=2)
      self.assertEqual(train.call_count, 6)
    self.assertEqual([r["activated_share"] for r in rows], [1.0, 0.5, 0.75])
    self.assertEqual(plot.read_bytes()[1:4], b"PNG")
    mha, moh, _ = (row["costs"] for row in rows)
    self.assertGreater(mha["step_flops"], moh["step_flops"])
    seeds = [call.args[0].train.seed for call in train.call_args_list]
    self.assertEqual(seeds, [0] * 3 + [1] * 3)

  def test_a_changed_config_is_refused(self):
    with mock.patch.object(comparison, "train", _fake_train):
      self._rows()
      optim = config_lib.OptimConfig(lr=0.25)
      self._write_config(
        dataclasses.replace(tiny_checkpoint.CONFIG, optim=optim)
      )
      status, out, err = self._compare()
    self.assertEqual((status, out), (2, ""))
    self.assertIn("comparison.json compares variants of another config", err)
    self.assertIn("optim.lr: 0.25 here, 0.001 there", err)
    self.assertLen(err.splitlines(), 1)

  def test_a_run_that_diverges_does_not_end_the_others(self):
    def train(config, *args, **options):
      if config.model.activated_share == 0.75:
        raise NonFiniteLossError("the loss is NaN at step 3")
      return _fake_train(config, *args, **options)

    with mock.patch.object(comparison, "train", train):
      status, out, err = self._compare("--rounds", 0, seeds=2)
    self.assertEqual(status, 0, err)
    self.assertIn("warning: moh75-seed1: the loss is NaN at step 3", err)
    self.assertIn("| moh75 | - (2 of 2 diverged) | - |", out)
    self.assertIn("| config | 0.5000 ± 0.0000 |", out)

  def test_numbers_that_json_lacks_are_read_again(self):
    def train(config, *args, **options):
      result = _fake_train(config, *args, **options)
      seed, share = config.train.seed, config.model.activated_share
      if seed == 2:
        raise NonFiniteLossError("at step 3: NaN, norm: Infinity")
      result.evaluation["perplexity"] = math.inf if seed else 9.0 - share
      return result

    argv = "--rounds", 0, "--metrics", "perplexity", "--variants", "mha,config"
    with mock.patch.object(comparison, "train", train):
      first = self._compare(*argv, seeds=3)
    with mock.patch.object(comparison, "train", side_effect=AssertionError):
      again = self._compare(*argv, seeds=3)
    self.assertEqual(again[:2], first[:2])
    self.assertIn("mha-seed2: at step 3: NaN, norm: Infinity\n", again[2])
    status, out, err = first
    self.assertEqual(status, 0, err)
    self.assertIn("warning: mha-seed1: perplexity is not finite", err)
    self.assertIn("| mha | 8.0000 (2 of 3 diverged) |", out)
    self.assertNotRegex(self._stored().read_text(), "Infinity,?\n")
    # As earlier versions wrote it.
    text = self._stored().read_text().replace(": null", ": Infinity")
    self._stored().write_text(text)
    with mock.patch.object(comparison, "train", side_effect=AssertionError):
      self.assertEqual(self._compare(*argv, seeds=3)[:2], first[:2])

  def _stored(self):
    return self.root / "runs" / "comparison.json"

  def test_each_program_is_timed(self):
    def seconds(programs, rounds):
      del rounds
      timed.append(len(programs))
      return {
        name: Timing(one.data.batch_size * one.model.activated_share, 0.0)
        for name, one in programs.items()
      }

    for sweep, programs, ratios in (
      ("data.batch_size=8,256", 4, ["1.00", "32.00", "0.50", "16.00"]),
      ("optim.lr=1e-4,1e-2", 2, ["1.00", "1.00", "0.50", "0.50"]),
    ):
      timed = []
      with (
        mock.patch.object(comparison, "train", _fake_train),
        mock.patch.object(bench, "step_seconds", seconds),
      ):
        status, out, err = self._compare(
          *("--sweep", sweep, "--variants", "mha,config")
        )
      self.assertEqual(status, 0, err)
      self.assertEqual(timed, [programs])
      found = [line.split("|")[-2].strip() for line in out.splitlines()[2:]]
      self.assertEqual(found, ratios)

  def test_a_stopped_run_goes_on(self):
    stopped = Result(state=None, evaluation={}, finished=False)
    with mock.patch.object(comparison, "train", return_value=stopped) as train:
      status, out, err = self._compare()
    self.assertEqual((status, out), (0, ""))
    self.assertIn("run the command again to go on", err)
    train.assert_called_once()
    with mock.patch.object(comparison, "train", _fake_train):
      self.assertLen(self._rows(), 3)


def _fake_train(config, workdir, **options):
  del workdir, options
  share = config.model.activated_share
  evaluation = {"accuracy": share, "loss": 1.0, "activated_share": share}
  return Result(state=None, evaluation=evaluation, finished=True)


if __name__ == "__main__":
  absltest.main()
