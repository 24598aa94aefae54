import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

import jax
from absl.testing import absltest, parameterized
from etils import epath

from moh_jax.config import LogConfig
from moh_jax.training.metrics import MetricsWriter

_QUIET = LogConfig(tensorboard=False, progress=False)


class MetricsWriterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = epath.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.file = pathlib.Path(self.dir) / "metrics.jsonl"

  def _writer(self, start=0, config=_QUIET):
    writer = MetricsWriter(self.dir, config, start=start, steps=8)
    self.addCleanup(writer.close)
    return writer

  def _rows(self):
    return [json.loads(line) for line in self.file.read_text().splitlines()]

  def _write_rows(self, *steps):
    lines = [
      json.dumps({"step": s, "split": "train", "loss": s}) for s in steps
    ]
    self.file.write_text("".join(line + "\n" for line in lines))

  def test_appends_a_row_per_call(self):
    writer = self._writer()
    writer.write(2, "train", {"loss": 1.5})
    writer.write(2, "val", {"accuracy": 0.25, "examples": 3})
    self.assertEqual(
      self._rows(),
      [
        {"step": 2, "split": "train", "loss": 1.5},
        {"step": 2, "split": "val", "accuracy": 0.25, "examples": 3},
      ],
    )

  def test_rows_are_on_disk_before_close(self):
    writer = self._writer()
    for step in range(1, 4):
      writer.write(step, "train", {"loss": 0.0})
      self.assertLen(self._rows(), step)

  def test_new_run_starts_an_empty_file(self):
    self._write_rows(1, 2)
    self._writer(start=0)
    self.assertEmpty(self._rows())

  def test_resuming_drops_rows_of_later_steps(self):
    self._write_rows(1, 2, 3, 4)
    self._writer(start=2)
    self.assertEqual([row["step"] for row in self._rows()], [1, 2])

  def test_resuming_appends_after_the_kept_rows(self):
    self._write_rows(1, 2, 3)
    self._writer(start=2).write(3, "train", {"loss": 9.0})
    self.assertEqual([row["loss"] for row in self._rows()], [1, 2, 9.0])

  @parameterized.parameters('{"step": 2, "spl', "{", '{"split": "train"}')
  def test_resuming_drops_a_half_written_row(self, tail):
    self._write_rows(1)
    with self.file.open("a") as stream:
      stream.write(tail)
    self._writer(start=2).write(3, "train", {"loss": 0.5})
    self.assertEqual([row["step"] for row in self._rows()], [1, 3])

  def test_other_processes_write_nothing(self):
    with mock.patch.object(jax, "process_index", return_value=1):
      writer = self._writer()
    writer.advance(1)
    writer.write(1, "train", {"loss": 0.5})
    self.assertFalse(self.file.exists())

  def test_without_a_terminal_rows_go_to_stderr(self):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      writer = self._writer(config=LogConfig(tensorboard=False))
      writer.write(2, "train", {"loss": 0.51239, "accuracy": 0.5})
      writer.write(2, "val", {"accuracy": 0.25})
    lines = err.getvalue().splitlines()
    self.assertStartsWith(lines[0], "step 2/8 train: loss 0.5124, acc 50.00%")
    self.assertEqual(lines[1], "step 2/8 val: acc 25.00%")
    self.assertEmpty(out.getvalue())

  def test_without_progress_nothing_is_printed(self):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      writer = self._writer()
      writer.write(2, "train", {"loss": 0.5})
      writer.write(2, "val", {"accuracy": 0.25})
    self.assertEqual((out.getvalue(), err.getvalue()), ("", ""))

  @parameterized.parameters(True, False)
  def test_tensorboard_is_written_where_configured(self, tensorboard):
    config = LogConfig(tensorboard=tensorboard, progress=False)
    writer = self._writer(config=config)
    writer.write(1, "train", {"loss": 0.5})
    writer.close()
    events = list((pathlib.Path(self.dir) / "tensorboard").glob("*tfevents*"))
    self.assertLen(events, int(tensorboard))


if __name__ == "__main__":
  absltest.main()
