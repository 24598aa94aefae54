import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.cli import bench
from moh_jax.ops import attention as ops
from moh_jax.speed import attention, model
from tests.cli import tiny_checkpoint

_FIELDS = {
  *("device", "op", "mode", "length", "share", "implementation", "ms"),
  *("spread", "ratio_to_mha", "ratio_spread", "form", "computed_share"),
  *("units_per_second", "flops"),
  *("peak_share", "peak_bytes", "max_error", "fault", "every_head"),
  *("measured", "temporary_bytes", "moved_bytes", "moved_by", "memory_share"),
  "kernels",
}
_TINY = {
  op: (
    op,
    *"--lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1".split(),
  )
  for op in ("attention", "layer", "decode")
}


class BenchCommandTest(parameterized.TestCase):
  def _call(self, *argv):
    with mock.patch.object(bench, "matrix_peak", lambda dtype: 1e15):
      return tiny_checkpoint.call("bench", *argv)

  def _root(self):
    return pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  @parameterized.parameters(("attention", 2), ("layer", 2), ("decode", 2))
  def test_json_has_every_field_of_every_row(self, op, count):
    forms = ("packed",) if op != "decode" else ("dense",)
    argv = [*_TINY[op], "--implementations", *forms]
    if op != "decode":
      argv += ["--modes", "forward"]
    status, out, err = self._call(*argv, "--json", "-")
    self.assertEqual((status, err), (0, ""))
    self.assertLen(out.splitlines(), 1)
    report = json.loads(out)
    self.assertRegex(report["machine"]["commit"], r"^[0-9a-f]{7,}\+?$")
    self.assertEqual(report["matrix_peak"], 1e15)
    self.assertEqual(report["settings"]["head_dim"], 8)
    self.assertLen(report["rows"], count)
    for row in report["rows"]:
      self.assertEqual(set(row), _FIELDS)
      self.assertEqual((row["op"], row["length"]), (op, 16))
      self.assertIsNone(row["fault"])
      self.assertLess(row["max_error"], 2e-6)
      self.assertGreater(row["flops"], 0)
      self.assertGreater(row["peak_bytes"], 0)
    self.assertEqual(report["rows"][0]["implementation"], "mha")
    self.assertEqual(report["rows"][-1]["share"], 0.5)

  def test_prints_a_table_and_writes_the_plot(self):
    root = self._root()
    status, out, _ = self._call(
      *_TINY["attention"],
      *("--modes", "forward,causal", "--implementations", "dense"),
      *("--json", root / "a.json", "--plot", root / "a.png"),
    )
    self.assertEqual(status, 0)
    self.assertRegex(
      out, r"(?m)^mode +length +share +implementation +form +computed +ms "
    )
    self.assertRegex(
      out, r"(?m)^forward +16 +100\.0% +mha +dense +100\.0% +\d+\.\d{3} "
    )
    self.assertRegex(out, r"(?m)^causal +16 +50\.0% +dense +dense +100\.0% ")
    self.assertRegex(
      out, r"(?m)^matrix peak: 1,000,000\.0 GFLOP/s \(float32\)$"
    )
    self.assertLen(json.loads((root / "a.json").read_text())["rows"], 4)
    self.assertEqual((root / "a.png").read_bytes()[1:4], b"PNG")

  def test_what_is_not_exact_is_named_and_fails(self):
    def wrong(*args, implementation, **options):
      out = ops.attention(*args, implementation="dense", **options)
      return out * (1.01 if implementation == "packed" else 1)

    with mock.patch.object(attention, "attention", wrong):
      status, out, err = self._call(
        *_TINY["attention"],
        *("--modes", "forward", "--implementations", "packed"),
      )
    self.assertEqual(status, 1)
    self.assertIn("1.0e-02", out)
    self.assertEqual(
      err,
      "error: attention forward, length 16, share 50.0%, packed: relative "
      "error of the outputs 1.0e-02 is above 2e-06\n",
    )

  def test_model_has_its_metrics(self):
    measured = {
      "train_step": {"params_bytes": 1234567, "compile_seconds": 2.5},
      "rows": [],
      "peak_resident_bytes": 10,
    }
    with mock.patch.object(model, "measure", return_value=measured) as measure:
      status, out, err = self._call(
        *("model", "--model", "moh-llm-s-75", "--lengths", "32"),
        *("--compile-only", "--json", "-"),
      )
      _, text, _ = self._call("model", "--batch", "2")
    self.assertEqual((status, err), (0, ""))
    options = [call.args[0] for call in measure.call_args_list]
    self.assertEqual(
      options,
      [
        model.ModelOptions("moh-llm-s-75", lengths=(32,), compile_only=True),
        model.ModelOptions(batch=2),
      ],
    )
    report = json.loads(out)
    self.assertEqual(report["settings"]["model"], "moh-llm-s-75")
    self.assertEqual(report["train_step"], measured["train_step"])
    self.assertEqual(
      text,
      "train_step params_bytes: 1,234,567\ntrain_step compile_seconds: 2.5\n",
    )

  @parameterized.parameters(
    (("attention", "--lengths", "0"), "--lengths 0 must be at least 1"),
    (("attention", "--target", "h1000"), "target='h1000' must be one of a100"),
    (("layer", "--shares", "90"), "--shares 90 must be a whole number of the"),
    (("decode", "--shares", "10"), "--shares 10 must be a whole number"),
    (("attention", "--modes", "back"), "--modes 'back' must be one of forward"),
    (
      ("layer", "--implementations", "dense,fast"),
      "--implementations 'fast' must be one of auto",
    ),
    (("model", "--model", "nope"), "model 'nope' must be one of"),
    (("model", "--lengths", "16"), "--lengths 16 is for language models"),
  )
  def test_wrong_values_are_one_line_before_any_work(self, argv, message):
    with mock.patch.object(bench, "matrix_peak", side_effect=AssertionError):
      status, out, err = tiny_checkpoint.call("bench", *argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)

  @parameterized.parameters(
    ((), "OP"),
    (("heads",), "invalid choice: 'heads'"),
    (("attention", "--lengths", "a"), "--lengths: 'a' must be integers"),
    (("attention", "--shares", "a"), "--shares: 'a' must be percentages"),
    (("decode", "--modes", "forward"), "unrecognized arguments: --modes"),
  )
  def test_wrong_arguments_are_wrong_use(self, argv, message):
    status, out, err = tiny_checkpoint.call("bench", *argv)
    self.assertEqual((status, out), (2, ""))
    self.assertIn(message, err)

  def test_traceback_may_stand_behind_the_op(self):
    argv = ("bench", "attention", "--lengths", "0", "--traceback")
    status, _, err = tiny_checkpoint.call(*argv)
    self.assertEqual(status, 2)
    self.assertIn("Traceback (most recent call last)", err)


if __name__ == "__main__":
  absltest.main()
