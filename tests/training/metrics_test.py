import contextlib
import io
import json
import os
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
import tensorboardX
from absl.testing import absltest, parameterized
from etils import epath
from PIL import Image

from moh_jax.config import LogConfig
from moh_jax.training import metrics
from moh_jax.training.metrics import MetricsWriter

_QUIET = LogConfig(tensorboard=False, progress=False)


class MetricsWriterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = epath.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.file = pathlib.Path(self.dir) / "metrics.jsonl"

  def _writer(self, start=0, config=_QUIET, shown=()):
    writer = MetricsWriter(self.dir, config, start=start, steps=8, shown=shown)
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

  def _printed(self, *rows, shown=()):
    """Lines on stderr for rows (step, split, values)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      writer = self._writer(config=LogConfig(tensorboard=False), shown=shown)
      for step, split, values in rows:
        writer.advance(step)
        writer.write(step, split, values)
    self.assertEmpty(out.getvalue())
    return err.getvalue().splitlines()

  def test_without_a_terminal_rows_go_to_stderr(self):
    lines = self._printed(
      (1, "train", {"loss": 0.51239, "accuracy": 0.5}),
      (1, "val", {"accuracy": 0.25, "tokens": 12345}),
      (2, "train", {"tokens_per_second": 4321.7}),
    )
    self.assertEqual(lines[0], "step 1/8 train: loss 0.5124, accuracy 50.0%")
    self.assertEqual(lines[1], "step 1/8 val: accuracy 25.0%, tokens 12,345")
    self.assertRegex(
      lines[2], r"^step 2/8 train: 4,322 tokens/s, ETA \d\d:\d\d$"
    )

  def test_shows_what_was_asked_for_in_that_order(self):
    values = {"loss": 2.0, "lr": 0.1, "bits_per_byte": 1.5}
    (line,) = self._printed(
      (1, "val", values), shown=("bits_per_byte", "mse", "loss")
    )
    self.assertEqual(line, "step 1/8 val: bits per byte 1.5000, loss 2.0000")

  @parameterized.parameters((0, True), (80, False))
  def test_terminal_without_a_width_gets_lines(self, columns, lines):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    terminal.fileno = lambda: 2
    size = os.terminal_size((columns, 24))
    with (
      contextlib.redirect_stderr(terminal),
      mock.patch.object(os, "get_terminal_size", return_value=size),
    ):
      writer = self._writer(config=LogConfig(tensorboard=False))
      writer.write(1, "train", {"loss": 0.5})
    self.assertEqual("step 1/8 train: loss" in terminal.getvalue(), lines)

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

  def test_tensorboard_forgets_the_steps_that_come_again(self):
    config = LogConfig(tensorboard=True, progress=False)
    for start in (0, 3, 0):  # the last one went back to the beginning
      with mock.patch.object(tensorboardX, "SummaryWriter") as summary:
        self._writer(start, config).close()
      self.assertEqual(summary.call_args[1]["purge_step"], start + 1)

  @parameterized.parameters(float("nan"), float("inf"), -float("inf"))
  def test_metrics_without_a_value_are_left_out(self, nothing):
    writer = self._writer()
    writer.write(1, "train", {"loss": 0.5, "mse_quartile1": nothing})
    self.assertEqual(self._rows(), [{"step": 1, "split": "train", "loss": 0.5}])

  @parameterized.parameters(({},), ({"mse": float("nan")},))
  def test_no_metrics_write_no_row(self, values):
    writer = self._writer()
    writer.write(1, "val", values)
    self.assertEmpty(self._rows())
    writer.write(1, "val", {"loss": 0.5})  # the step is not taken by nothing
    self.assertLen(self._rows(), 1)


class WriteImageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _write(self, picture, step=12, tensorboard=False):
    config = LogConfig(tensorboard=tensorboard, progress=False)
    writer = MetricsWriter(epath.Path(self.dir), config, start=0, steps=20)
    self.addCleanup(writer.close)
    writer.write_image(step, "samples", picture)
    return writer

  def _picture(self, channels):
    shape = (6, 4, channels)
    return np.random.RandomState(0).randint(0, 256, shape, np.uint8)

  def test_picture_goes_to_wandb(self):
    config = LogConfig(tensorboard=False, progress=False, wandb="project")
    with mock.patch.object(metrics, "_Wandb") as log:
      writer = MetricsWriter(epath.Path(self.dir), config, start=0, steps=20)
      self.addCleanup(writer.close)
      writer.write_image(12, "samples", self._picture(1))
    ((step, pictures), _) = log.return_value.show.call_args
    self.assertEqual((step, list(pictures)), (12, ["samples"]))

  @parameterized.parameters((1, "L"), (3, "RGB"))
  def test_png_holds_the_picture(self, channels, mode):
    picture = self._picture(channels)
    self._write(picture)
    with Image.open(self.dir / "samples" / "00000012.png") as stored:
      self.assertEqual(stored.mode, mode)
      pixels = np.asarray(stored).reshape(picture.shape)
    np.testing.assert_array_equal(pixels, picture)

  def test_killed_while_writing_leaves_the_picture_before(self):
    old, new = self._picture(1), 255 - self._picture(1)
    self._write(old)
    before = (self.dir / "samples" / "00000012.png").read_bytes()
    write = pathlib.Path.write_bytes

    def half(path, data):
      write(path, data[:20])
      raise KeyboardInterrupt

    with mock.patch.object(pathlib.Path, "write_bytes", half):
      with self.assertRaises(KeyboardInterrupt):
        self._write(new)
    after = (self.dir / "samples" / "00000012.png").read_bytes()
    self.assertEqual(after, before)

  def test_nothing_temporary_stays(self):
    self._write(self._picture(1))
    names = [path.name for path in (self.dir / "samples").iterdir()]
    self.assertEqual(names, ["00000012.png"])

  @parameterized.parameters(1, 3)
  def test_tensorboard_gets_it_where_configured(self, channels):
    writer = self._write(self._picture(channels), tensorboard=True)
    writer.close()
    (events,) = (self.dir / "tensorboard").glob("*tfevents*")
    content = events.read_bytes()
    self.assertIn(b"samples", content)
    self.assertIn(b"PNG", content)

  def test_other_processes_write_nothing(self):
    with mock.patch.object(jax, "process_index", return_value=1):
      self._write(self._picture(1))
    self.assertEmpty(list(self.dir.iterdir()))


if __name__ == "__main__":
  absltest.main()
