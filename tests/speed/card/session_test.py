"""Stages that are cut, fail, are damaged or have no time left."""

import json
import os
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.kernels import backends
from moh_jax.ops.kernels.sizes import BlockSizes, Key, Tile
from moh_jax.speed import tiles
from moh_jax.speed.card import session
from moh_jax.speed.card.scale import scale_for
from moh_jax.speed.card.stages import Stage

_SCALE = scale_for("cpu")


@pytest.mark.slow
class SessionTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path) / "card"
    self.ran = []

  def _stage(self, name, result=None):
    def measure():
      self.ran.append(name)
      if isinstance(result, BaseException):
        raise result
      return result if result is not None else {"value": name}

    return Stage(name, measure)

  def _run(self, *stages, minutes=1.0, scale=_SCALE):
    self.ran.clear()
    lines = []
    store = session.open_store(self.folder, scale)
    with mock.patch.object(session, "stages", lambda *_: iter(stages)):
      outcome = session.run(store, scale, minutes, lines.append)
    return outcome, lines

  def test_what_is_done_is_not_done_again(self):
    stages = [self._stage("a"), self._stage("b_1")]
    outcome, lines = self._run(*stages)
    self.assertEqual(self.ran, ["a", "b_1"])
    self.assertLen(lines, 2)
    again, lines = self._run(*stages)
    self.assertEqual(self.ran, [])
    self.assertEqual(lines, [])
    self.assertEqual(again.results, outcome.results)
    self.assertEqual(again.results["b_1"], {"value": "b_1"})

  def test_a_cut_leaves_what_was_done(self):
    with self.assertRaises(KeyboardInterrupt):
      self._run(self._stage("a"), self._stage("b", KeyboardInterrupt()))
    self.assertEqual([p.name for p in self.folder.iterdir()], ["a.json"])
    outcome, _ = self._run(self._stage("a"), self._stage("b"))
    self.assertEqual(self.ran, ["b"])
    self.assertEqual(list(outcome.results), ["a", "b"])

  def test_a_stage_that_fails_is_one_line_and_the_next_goes_on(self):
    error = RuntimeError("out\nof memory")
    outcome, lines = self._run(self._stage("a", error), self._stage("b"))
    self.assertEqual(self.ran, ["a", "b"])
    self.assertEqual(lines[0], "a failed: RuntimeError: out of memory")
    self.assertEqual(outcome.faults, ["a: RuntimeError: out of memory"])
    self._run(self._stage("a"), self._stage("b"))
    self.assertEqual(self.ran, ["a"])

  @parameterized.parameters(
    "", "{", "[]", "{}", '{"stage": "b"}', '{"stage": "a", "result": {}}'
  )
  def test_damaged_results_are_measured_again(self, content):
    self._run(self._stage("a"))
    (self.folder / "a.json").write_text(content)
    outcome, _ = self._run(self._stage("a"))
    self.assertEqual(self.ran, ["a"])
    self.assertEqual(outcome.results["a"], {"value": "a"})

  def test_rows_of_another_kind_are_damage(self):
    self._run(self._stage("a"))
    path = self.folder / "a.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"result": {"rows": [{"speed": 1}]}}))
    self._run(self._stage("a"))
    self.assertEqual(self.ran, ["a"])

  def test_results_of_another_scale_are_measured_again(self):
    self._run(self._stage("a"))
    self._run(self._stage("a"), scale=scale_for("gpu"))
    self.assertEqual(self.ran, ["a"])

  def test_results_of_another_device_are_refused(self):
    self._run(self._stage("a"))
    path = self.folder / "a.json"
    entry = json.loads(path.read_text())
    entry["settings"]["machine"]["device"] = "NVIDIA X"
    path.write_text(json.dumps(entry))
    with self.assertRaisesRegex(ValueError, "--out .* of 'NVIDIA X', this is"):
      self._run(self._stage("a"))

  def test_a_file_is_no_folder(self):
    self.folder.write_text("")
    with self.assertRaises(FileExistsError):
      self._run()

  def test_no_stage_begins_without_time(self):
    outcome, _ = self._run(self._stage("a"), self._stage("b"), minutes=0.0)
    self.assertEqual(self.ran, [])
    self.assertEqual(outcome.left, ["a", "b"])
    self.assertEqual(outcome.faults, [])

  def test_a_stage_that_would_not_end_in_time_is_left(self):
    now = [0.0]

    def slow(name):
      def measure():
        self.ran.append(name)
        now[0] += 40
        return {}

      return Stage(name, measure)

    stages = [slow("core_1"), slow("core_2"), slow("model_1"), slow("core_3")]
    with mock.patch.object(session.time, "perf_counter", lambda: now[0]):
      outcome, _ = self._run(*stages)
    self.assertEqual(self.ran, ["core_1", "model_1"])
    self.assertEqual(outcome.left, ["core_2", "core_3"])

  def test_what_is_wrong_in_a_result_is_named(self):
    row = {
      **{"device": "cpu", "op": "attention", "mode": "causal", "length": 16},
      **{"share": 0.5, "implementation": "kernel", "fault": "is not exact"},
    }
    check = {"form": "cudnn", "case": "causal", "max_error": 1.0, "fault": "x"}
    outcome, _ = self._run(
      self._stage("core", {"rows": [row]}),
      self._stage("exact", {"checks": [check, check | {"fault": None}]}),
      self._stage("model", {"fault": "the loss is nan"}),
    )
    self.assertEqual(
      outcome.faults,
      [
        "core: attention causal, length 16, share 50.0%, kernel: is not exact",
        "exact: cudnn, causal: x",
        "model: the loss is nan",
      ],
    )


class TilesTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.enterContext(mock.patch.dict(os.environ))
    os.environ.pop(backends.FILE_VARIABLE, None)
    self.addCleanup(backends.measured.cache_clear)
    folder = self.create_tempdir().full_path
    self.store = session.open_store(folder, _SCALE)
    self.path = self.store.folder / "tiles.json"

  def _write(self, rows):
    tile = Tile(rows, 32)
    key = Key("triton", "X", 64, "bfloat16")
    tiles.write(self.path, {key: BlockSizes(tile, tile, tile)})
    return key

  def test_tuned_tiles_are_used(self):
    used = session._use_tiles(self.store, "")
    self.assertEqual(used, "")
    self.assertEqual(backends.measured(), {})
    for rows in (16, 32):
      key = self._write(rows)
      used = session._use_tiles(self.store, used)
      self.assertEqual(backends.measured()[key].rows, rows)

  def test_those_that_the_user_names_stay(self):
    self._write(16)
    os.environ[backends.FILE_VARIABLE] = "/mine.json"
    self.assertEqual(session._use_tiles(self.store, ""), "")
    self.assertEqual(os.environ[backends.FILE_VARIABLE], "/mine.json")


if __name__ == "__main__":
  absltest.main()
