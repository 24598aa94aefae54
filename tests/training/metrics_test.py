"""What a run writes of its metrics, also into buckets; loads of heads."""

import contextlib
import io
import json
import logging
import os
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorboardX
from absl.testing import parameterized
from etils import epath
from PIL import Image

from moh_jax.training import metrics
from moh_jax.training.metrics import Log
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.step import HEAD_LOADS, metric_values
from tests import folders
from tests.training import tiny

_TASK = types.SimpleNamespace(
  unit="tokens", units_per_step=8, shown=("bits_per_byte", "accuracy")
)
_MESH = types.SimpleNamespace(size=1)
_EVEN = [[[1.0, 1.0]], [[1, 1, 0.5, 0.5], [1, 1, 0.4, 0.6]]]


class _Bucket(type(epath.Path("/"))):
  """A local path that calls itself an address."""

  def __str__(self):
    return f"fake://{super().__str__().lstrip('/')}"


class LogTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.file = self.root / "metrics.jsonl"
    self.said = io.StringIO()
    self.enterContext(contextlib.redirect_stderr(self.said))

  def _log(self, start=0, path=epath.Path, config=None, **log):
    config = config or tiny.deterministic_config(log=log, train={"steps": 8})
    made = Log(path(self.root), config, _TASK, _MESH, start)
    self.addCleanup(made.__exit__)
    return made

  def _rows(self, *splits):
    rows = map(json.loads, self.file.read_text().splitlines())
    return [row for row in rows if not splits or row["split"] in splits]

  @staticmethod
  def _step(log, step, **values):
    log.step(step, {"loss": 1.0, "grad_norm": 1.0, **values})

  def test_a_row_is_on_disk_at_once_and_written_once(self):
    log = self._log()
    log.write(2, "val", {"none": float("nan")})  # no row
    for loss in (0.25, 0.5):
      log.write(2, "val", {"loss": loss, "examples": 3, "all": np.inf})
    row = {"step": 2, "split": "val", "loss": 0.25, "examples": 3}
    self.assertEqual(self._rows(), [row])

  @parameterized.parameters(
    (0, "", [9]), (2, "", [1, 2, 9]), (4, '{"step": 5, "spl', [1, 2, 3, 4, 9])
  )
  def test_resuming_drops_later_and_half_written_rows(self, start, tail, left):
    lines = [json.dumps({"step": s, "split": "train"}) for s in (1, 2, 3, 4)]
    self.file.write_text("\n".join([*lines, tail]))
    self._log(start).write(9, "train", {"loss": 9.0})
    self.assertEqual([row["step"] for row in self._rows()], left)

  def test_other_processes_write_nothing(self):
    with mock.patch.object(jax, "process_index", return_value=1):
      log = self._log()
    log.write(1, "train", {"loss": 0.5})
    log.picture(1, "samples", np.zeros((6, 4, 1), np.uint8))
    log.copy()
    self.assertEmpty(list(self.root.iterdir()))
    self.assertEmpty(self.said.getvalue())

  def test_a_step_is_read_when_the_next_is_on_its_way(self):
    log = self._log(every=2)
    for step in (1, 2, 3):
      self._step(log, step, loss=0.5123, accuracy=0.5)
    (row,) = self._rows()
    self.assertEqual((row["step"], row["loss"]), (2, 0.5123))
    self.assertGreater(row["tokens_per_second"], 0)
    self.assertRegex(
      self.said.getvalue(),
      r"^step 2/8 train: loss 0.5123, accuracy 50.0%, [\d,]+ tokens/s, "
      r"ETA \d\d:\d\d\n$",
    )

  def test_what_comes_before_the_first_step_takes_none_of_its_time(self):
    log = self._log(every=2)
    with mock.patch.object(metrics, "time") as clock:
      for step, clock.monotonic.return_value in ((1, 100), (2, 101), (3, 104)):
        self._step(log, step)
    # Two steps of two seconds; six are left.
    self.assertIn("ETA 00:12", self.said.getvalue())

  @parameterized.parameters((10, 3000), (10, 4000), (1, 4000))
  def test_more_than_an_hour_is_told_after_three_steps(self, every, seconds):
    log = self._log(4, every=every)
    with mock.patch.object(metrics, "time") as clock, self.assertLogs() as told:
      logging.info("nothing else")
      for step in (5, 6, 7, 8):
        clock.monotonic.return_value = seconds * step
        self._step(log, step)
    found = [line for line in told.output if "hours" in line]
    known = every > 3 and seconds > 3600
    expected = ["INFO:moh_jax.training.metrics:1 steps take about 1.1 hours"]
    self.assertEqual(found, expected * known)

  @parameterized.parameters("loss", "grad_norm")
  def test_what_is_not_finite_ends_the_run_unless_it_is_skipped(self, name):
    log = self._log(config=tiny.config(optim={"skip_nonfinite": 2}))
    for step in (1, 2, 3):
      self._step(log, step, **{name: np.nan}, skipped=step)
    with self.assertRaisesRegex(NonFiniteLossError, f"{name}=nan at step 3"):
      log.flush()

  def test_tensorboard_and_png_hold_the_picture(self):
    summary = tensorboardX.SummaryWriter
    with mock.patch.object(tensorboardX, "SummaryWriter", wraps=summary) as new:
      log = self._log(1, tensorboard=True)
    self.assertEqual(new.call_args[1]["purge_step"], 2)  # those come again
    log.write(2, "train", {"loss": 0.5})
    picture = np.random.RandomState(0).randint(0, 256, (6, 4, 1), np.uint8)
    log.picture(2, "samples", picture)
    with Image.open(self.root / "samples/00000002.png") as stored:
      np.testing.assert_array_equal(np.asarray(stored), picture[..., 0])
    log.__exit__()
    (events,) = (self.root / "tensorboard").glob("*tfevents*")
    for text in (b"train/loss", b"samples", b"PNG"):
      self.assertIn(text, events.read_bytes())

  def test_wandb_gets_rows_offline(self):
    pytest.importorskip("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    with mock.patch.dict(os.environ, offline):
      log = self._log(wandb="moh")
      log.write(2, "val", {"loss": 0.5})
      log.__exit__()
    (stored,) = (self.root / "wandb").glob("offline-run-*/*.wandb")
    self.assertIn(b"val/loss", stored.read_bytes())

  def test_a_bucket_gets_rows_and_events_at_checkpoints(self):
    lines = [json.dumps({"step": s, "split": "val"}) + "\n" for s in (3, 4)]
    self.file.write_text("".join(lines))
    with mock.patch.object(
      metrics, "in_bucket", lambda path: isinstance(path, _Bucket)
    ):
      log = self._log(3, path=_Bucket, tensorboard=True)
      log.write(4, "train", {"loss": 0.5})
      self.assertEqual([row["split"] for row in self._rows()], ["val", "val"])
      log.copy()
      self.assertEqual([row["split"] for row in self._rows()], ["val", "train"])
      log.__exit__()
    self.assertLen(list((self.root / "tensorboard").glob("*tfevents*")), 1)

  def test_loads_are_by_number_whatever_heads_are_shared(self):
    model = {"shared_heads": (2, 2), "top_k": (1, 1), "num_kv_heads": 4}
    model["head_order"] = ((3, 1, 2, 0), (0, 1, 2, 3))
    config = tiny.llm_config(model=model, log={"heads": 3, "every": 4})
    loads = np.float32([[0.7, 1.0, 0.3, 1.0], [1.0, 1.0, 0.6, 0.4]])
    log = self._log(config=config)
    for step in range(1, 5):
      self._step(log, step, **{HEAD_LOADS: (loads,)})
    log.flush()
    heads = {"blocks0.0": [0.7, 0.3], "blocks0.1": [0.6, 0.4]}
    expected = [{"step": step, "split": "heads", **heads} for step in (3, 4)]
    self.assertEqual(self._rows("heads"), expected)

  def test_a_collapse_and_its_end_are_called_out_once(self):
    log = self._log(every=1)
    collapsed = [[[1.0, 1.0]], [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]]
    wavers = [1.0, 1.0, 0.97, 0.03]  # an entropy of 0.16
    nearly = [collapsed[0], [wavers, collapsed[1][1]]]
    with self.assertLogs("moh_jax", "WARNING") as logs:
      for step, loads in ((1, collapsed), (2, nearly), (3, _EVEN)):
        self._step(log, step, **{HEAD_LOADS: loads})
      log.flush()
    self.assertLen(logs.records, 4)  # of the two layers that can choose
    layer = "the router of layer stage2.0 has"
    self.assertRegex(
      logs.output[0], f"step 1: {layer} collapsed: .*raise train"
    )
    self.assertRegex(logs.output[2], f"step 3: {layer} recovered .*1.000")
    first, _, last = (row["load_entropy"] for row in self._rows("train"))
    self.assertEqual(first, 0.0)
    self.assertGreater(last, 0.9)

  def test_microbatches_are_averaged(self):
    parts = jnp.asarray([[[1.0, 0.0]], [[0.5, 0.5]]])  # [parts, layers, H]
    (mean,) = metric_values({"x": (parts,)})["x"]
    np.testing.assert_allclose(mean, [[0.75, 0.25]])
