"""`bench card` on a CPU: everything once, in tiny shapes."""

import itertools
import json
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from moh_jax.cli import bench_card
from moh_jax.ops.crossovers import Crossover
from moh_jax.speed import programs
from moh_jax.speed.card import session, stages
from moh_jax.speed.card.crossing import Measured
from tests.cli import tiny_checkpoint
from tests.ops.devices import traced_for, with_triton


def _all_but(*kinds):
  """Stages of some kinds only, of which others are tested elsewhere."""

  def chosen(*args):
    return (
      stage
      for stage in stages.stages(*args)
      if not stage.name.startswith(kinds)
    )

  return mock.patch.object(session, "stages", chosen)


class BenchCardTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.create_tempdir().full_path) / "card"
    self.enterContext(mock.patch.object(programs, "_CPU_SIZES", (32,)))

  def _call(self, *argv):
    return tiny_checkpoint.call("bench", "card", "--out", self.out, *argv)

  @pytest.mark.slow
  def test_measures_prints_and_continues(self):
    parts = "exact", "model", "core_8_causal", "core_8_forward_backward"
    with _all_but(*parts):
      status, out, err = self._call("--minutes", "0")
      self.assertEqual((status, err), (0, ""))
      self.assertRegex(out, r"4 stages are left, peaks first: run the same")
      self.assertEqual(list(self.out.glob("*.json")), [])

      status, out, err = self._call()
      self.assertEqual((status, err), (0, ""))
      self.assertRegex(out, r"(?m)^core_8_forward_256: \d+\.\d s$")
      self.assertRegex(out, r"(?m)^core, head dim 8$")
      self.assertRegex(out, r"(?m)^forward +256 +50\.0% +packed +active +\d")
      self.assertRegex(out, r"(?m)^decode +16 +100\.0% +mha +all +\d")
      (line,) = [x for x in out.splitlines() if x.startswith("Crossover(")]
      (entry,) = eval(f"({line})", {"Crossover": Crossover})
      self.assertEqual((entry.backend, entry.head_dim), ("xla", 8))
      self.assertTrue(entry.measured)
      self.assertEqual((self.out / "crossovers.txt").read_text(), f"{line}\n")
      self.assertEqual((self.out / "core_8.png").read_bytes()[1:4], b"PNG")

      before = {path: path.stat().st_mtime_ns for path in self._files()}
      (self.out / "decode_8_16.json").write_text("{")
      status, again, _ = self._call()
      self.assertEqual(status, 0)
      ran = [x for x in again.splitlines() if x.endswith(" s")]
      self.assertLen(ran, 1)
      self.assertStartsWith(ran[0], "decode_8_16: ")
      self.assertIn(line, again)
      changed = {p for p in self._files() if p.stat().st_mtime_ns != before[p]}
      self.assertEqual({path.name for path in changed}, {"decode_8_16.json"})

  def _files(self):
    return sorted(self.out.glob("*.json"))

  def test_entries_are_for_the_kernel_that_ran(self):
    with with_triton(), traced_for("gpu", "NVIDIA H100"):
      names = [
        bench_card._backends(Measured(dim, "bfloat16", []))["kernel"]
        for dim in (64, 72)
      ]
    self.assertEqual(names, ["mosaic_gpu", "triton"])

  def test_a_failing_stage_is_one_line_and_the_status(self):
    only = lambda scale, store: itertools.islice(  # noqa: E731
      stages.stages(scale, store), 2
    )
    error = RuntimeError("no\ndevice")
    with (
      mock.patch.object(session, "stages", only),
      mock.patch.object(stages, "_peaks", side_effect=error),
      mock.patch.object(stages.exact, "measure", return_value={"checks": []}),
    ):
      status, out, err = self._call()
    self.assertEqual(status, 1)
    self.assertEqual(err, "error: peaks: RuntimeError: no device\n")
    self.assertIn("peaks failed: RuntimeError: no device", out)
    self.assertEqual(
      [path.name for path in self._files()], ["exact_float32_8.json"]
    )

  def test_results_of_another_device_are_refused_before_any_work(self):
    self.out.mkdir()
    entry = {
      "stage": "peaks",
      "settings": {"machine": {"device": "NVIDIA X"}},
      "result": {},
    }
    (self.out / "peaks.json").write_text(json.dumps(entry))
    status, out, err = self._call()
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, r"^error: --out .* holds results of 'NVIDIA X'")

  @parameterized.parameters("a", "-1", "nan", "inf")
  def test_minutes_are_a_number(self, minutes):
    status, _, err = self._call(f"--minutes={minutes}")
    self.assertEqual(status, 2)
    self.assertIn(f"{minutes} must be a number of at least 0", err)


if __name__ == "__main__":
  absltest.main()
