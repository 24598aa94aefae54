"""What a run writes of its metrics, also into buckets; loads of heads."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
from absl.testing import absltest, parameterized
from etils import epath
from PIL import Image
from tensorboardX import record_writer

from moh_jax.config import LogConfig
from moh_jax.training import metrics
from moh_jax.training.metrics import HeadWatch, MetricsWriter
from moh_jax.training.step import HeadLoads, metric_values
from tests.training import tiny

_QUIET = LogConfig(tensorboard=False, progress=False)
_CONFIG = tiny.deterministic_config(log={"heads": 2, "every": 1})


class _WriterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.dir = pathlib.Path(self.create_tempdir().full_path)
    self.file = self.dir / "metrics.jsonl"

  def _writer(self, start=0, shown=(), path=epath.Path, **log):
    config = dataclasses.replace(_QUIET, **log)
    path = path(self.dir)
    writer = MetricsWriter(path, config, start=start, steps=8, shown=shown)
    self.addCleanup(writer.close)
    return writer

  def _rows(self):
    return [json.loads(line) for line in self.file.read_text().splitlines()]


class RowsTest(_WriterTest):
  def test_a_row_is_on_disk_at_once_and_written_once(self):
    writer = self._writer()
    writer.write(2, "train", {"loss": 1.5, "none": float("nan"), "all": np.inf})
    self.assertLen(self._rows(), 1)
    writer.write(2, "val", {"none": float("nan")})  # no row
    for loss in (0.25, 0.5):
      writer.write(2, "val", {"loss": loss, "examples": 3})
      writer.write_loads(2, {"stage1.0": np.array([loss, 2 / 3])})
    self.assertEqual(
      self._rows(),
      [
        {"step": 2, "split": "train", "loss": 1.5},
        {"step": 2, "split": "val", "loss": 0.25, "examples": 3},
        {"step": 2, "split": "heads", "stage1.0": [0.25, 0.667]},
      ],
    )

  @parameterized.parameters(
    (0, "", [9]), (2, "", [1, 2, 9]), (4, '{"step": 5, "spl', [1, 2, 3, 4, 9]),
    (4, "{", [1, 2, 3, 4, 9]), (2, '{"split": "train"}', [1, 2, 9]),
  )  # fmt: skip
  def test_resuming_drops_later_and_half_written_rows(self, start, tail, left):
    lines = [json.dumps({"step": s, "split": "train"}) for s in (1, 2, 3, 4)]
    self.file.write_text("\n".join([*lines, tail]))
    self._writer(start=start).write(9, "train", {"loss": 9.0})
    self.assertEqual([row["step"] for row in self._rows()], left)

  def test_other_processes_write_nothing(self):
    with mock.patch.object(jax, "process_index", return_value=1):
      writer = self._writer()
    writer.write(1, "train", {"loss": 0.5})
    writer.write_image(1, "samples", np.zeros((6, 4, 1), np.uint8))
    writer.write_loads(1, {"a": np.ones(2)})
    self.assertEmpty(list(self.dir.iterdir()))

  def test_rows_are_lines_on_stderr_where_configured(self):
    rates = {"tokens_per_second": 4321.7, "step_seconds_p50": 2.0}
    shown = ("bits_per_byte", "loss", "accuracy", "tokens", "tokens_per_second")
    with contextlib.redirect_stderr(io.StringIO()) as said:
      writer = self._writer(progress=True, shown=shown)
      row = {"accuracy": 0.5, "loss": 0.51239, "lr": 0.1, "tokens": 12345}
      writer.write(1, "val", row)
      writer.write(2, "train", rates)
      self._writer(start=2).write(3, "train", {"loss": 1.0})
      self._writer(start=3, progress=True).write(4, "train", rates)
    first, after, alone = said.getvalue().splitlines()
    told = "step 1/8 val: loss 0.5124, accuracy 50.0%, tokens 12,345"
    self.assertEqual(first, told)
    self.assertRegex(after, r"^step 2/8 train: 4,322 tokens/s, ETA \d\d:\d\d$")
    # The first row has the time of its steps.
    self.assertEndsWith(alone, "step seconds p50 2.0000, ETA 00:08")


class ViewersTest(_WriterTest):
  def test_tensorboard_and_png_hold_the_picture(self):
    self._writer().write(1, "train", {"loss": 0.5})
    self.assertFalse((self.dir / "tensorboard").exists())
    writer = self._writer(tensorboard=True)
    writer.write(2, "train", {"loss": 0.5})
    for step, (channels, mode) in enumerate(((1, "L"), (3, "RGB"))):
      shape = (6, 4, channels)
      picture = np.random.RandomState(0).randint(0, 256, shape, np.uint8)
      writer.write_image(step, "samples", picture)
      with Image.open(self.dir / f"samples/{step:08d}.png") as stored:
        self.assertEqual(stored.mode, mode)
        pixels = np.asarray(stored).reshape(picture.shape)
      np.testing.assert_array_equal(pixels, picture)
    self.assertLen(list((self.dir / "samples").iterdir()), 2)
    writer.close()
    (events,) = (self.dir / "tensorboard").glob("*tfevents*")
    for text in (b"train/loss", b"samples", b"PNG"):
      self.assertIn(text, events.read_bytes())

  def test_tensorboard_forgets_the_steps_that_come_again(self):
    with mock.patch.object(tensorboardX, "SummaryWriter") as summary:
      self._writer(3, tensorboard=True)
    self.assertEqual(summary.call_args[1]["purge_step"], 4)

  def test_wandb_gets_rows_offline(self):
    if importlib.util.find_spec("wandb") is None:
      self.skipTest("wandb is not installed")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with mock.patch.dict(os.environ, offline):
      writer = self._writer(wandb="moh")
      writer.write(2, "val", {"loss": 0.5})
      writer.close()
    (stored,) = (self.dir / "wandb").glob("offline-run-*/*.wandb")
    self.assertIn(b"val/loss", stored.read_bytes())


class _Bucket(type(epath.Path("/"))):
  """A local path that calls itself an address."""

  def __str__(self):
    return f"fake://{super().__str__().lstrip('/')}"


class BucketTest(_WriterTest):
  def setUp(self):
    super().setUp()
    self.write = self.enterContext(mock.patch.object(metrics, "write_whole"))

  def test_file_is_written_before_checkpoints_not_for_each_row(self):
    writer = self._writer(path=_Bucket)
    for step in range(1, 6):
      writer.write(step, "train", {"loss": 0.5})
    self.write.assert_not_called()
    writer.flush()
    writer.flush()
    self.write.assert_called_once()
    writer.write(6, "train", {"loss": 0.5})
    writer.close()
    self.file.write_bytes(self.write.call_args.args[1])
    self.assertLen(self._rows(), 6)
    writer = self._writer(start=3, path=_Bucket)
    with mock.patch.object(metrics.time, "monotonic", lambda: 1e9):  # later
      writer.write(4, "train", {"loss": 0.5})
    self.file.write_bytes(self.write.call_args.args[1])
    self.assertEqual([row["step"] for row in self._rows()], [1, 2, 3, 4])

  def test_events_need_no_package_of_the_cloud(self):
    with (
      mock.patch.object(record_writer, "GCS_ENABLED", False),
      mock.patch.dict(record_writer.REGISTERED_FACTORIES),
      mock.patch.object(metrics.epath, "Path") as path,
    ):
      writer = self._writer(path=_Bucket, tensorboard=True)
      writer.write(2, "train", {"loss": 0.5})
      writer.close()
    (content,) = path.return_value.write_bytes.call_args.args
    self.assertIn(b"train/loss", content)


class HeadWatchTest(absltest.TestCase):
  def test_heads_are_listed_by_number_whatever_heads_are_shared(self):
    model = dataclasses.replace(
      tiny.LLM, shared_heads=(2, 2), top_k=(1, 1), num_kv_heads=4,
      head_order=((3, 1, 2, 0), (0, 1, 2, 3)),
    )  # fmt: skip
    loads = np.float32([[0.7, 1.0, 0.3, 1.0], [1.0, 1.0, 0.6, 0.4]])
    by_layer = HeadWatch(tiny.llm_config(model=vars(model))).by_layer([loads])
    np.testing.assert_array_equal(by_layer["blocks0.0"], loads[0, [0, 2]])
    np.testing.assert_array_equal(by_layer["blocks0.1"], loads[1, 2:])

  def test_a_collapsed_router_is_called_out_once(self):
    watch = HeadWatch(_CONFIG)
    loads = [[[1.0, 1.0]], [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]]
    by_layer = watch.by_layer(loads)
    self.assertEqual(list(by_layer), ["stage1.0", "stage2.0", "stage2.1"])
    with self.assertLogs("moh_jax", "WARNING") as logs:
      values = [watch.metrics(step, loads) for step in (1, 2)]
    self.assertLen(logs.records, 2)
    pattern = r"step 1: the router of layer stage2.0 has collapsed"
    self.assertRegex(logs.output[0], pattern)
    # The first stage has one routed head, so its tokens have no choice.
    expected = {"load_entropy": 0.0, "collapsed_routers": 2.0}
    self.assertEqual(values, [expected] * 2)
    even = ([[1.0, 1.0]], [[1, 1, 0.5, 0.5], [1, 1, 0.4, 0.6]])
    with self.assertNoLogs("moh_jax", "WARNING"):
      values = HeadWatch(_CONFIG).metrics(1, even)
    self.assertEqual(values["collapsed_routers"], 0.0)
    self.assertGreater(values["load_entropy"], 0.9)

  def test_due_at_multiples_and_at_the_end(self):
    for heads, steps in ((2, [2, 4]), (3, [3, 4]), (0, [])):
      watch = HeadWatch(tiny.deterministic_config(log={"heads": heads}))
      self.assertEqual([s for s in range(1, 5) if watch.due(s)], steps)

  def test_microbatches_are_averaged(self):
    parts = jnp.asarray([[[1.0, 0.0]], [[0.5, 0.5]]])  # [parts, layers, H]
    (mean,) = metric_values({"x": HeadLoads((parts,))})["x"]
    np.testing.assert_allclose(mean, [[0.75, 0.25]])
