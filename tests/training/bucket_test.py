"""Metrics and tensorboard events of a run whose workdir is a bucket."""

import json
import os
import pathlib
import struct
from unittest import mock

from absl.testing import absltest
from etils import epath
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from moh_jax.config import LogConfig
from moh_jax.training import metrics


class _Bucket(type(epath.Path("/"))):
  """A local path that calls itself an address, and counts its writes."""

  writes = 0

  def __str__(self):
    return f"fake://{super().__str__().lstrip('/')}"


def _events(content):
  """Scalars of an event file: {(tag, step): value}."""
  found, place = {}, 0
  while place < len(content):
    (length,) = struct.unpack_from("Q", content, place)
    event = event_pb2.Event()
    event.ParseFromString(content[place + 12 : place + 12 + length])
    for value in event.summary.value:
      found[value.tag, event.step] = value.simple_value
    place += 16 + length
  return found


class BucketTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.file = self.root / "metrics.jsonl"
    self.writes = []
    write = metrics.write_whole

    def counted(path, content):
      self.writes.append(len(content))
      write(epath.Path(os.fspath(path).replace("fake://", "/")), content)

    self.enterContext(mock.patch.object(metrics, "write_whole", counted))
    factories = dict(record_writer.REGISTERED_FACTORIES)
    self.enterContext(
      mock.patch.object(record_writer, "REGISTERED_FACTORIES", factories)
    )
    self.enterContext(
      mock.patch.object(
        metrics.epath,
        "Path",
        lambda path: pathlib.Path(str(path).replace("fake://", "/")),
      )
    )

  def _writer(self, tensorboard=False, start=0):
    config = LogConfig(tensorboard=tensorboard, progress=False)
    return metrics.MetricsWriter(
      _Bucket(self.root), config, start=start, steps=9
    )

  def _steps(self):
    return [json.loads(x)["step"] for x in self.file.read_text().splitlines()]

  def test_file_is_written_before_checkpoints_not_for_each_row(self):
    writer = self._writer()
    for step in range(1, 6):
      writer.write(step, "train", {"loss": 0.5})
    self.assertEqual(self.writes, [])
    writer.flush()
    self.assertEqual(self._steps(), [1, 2, 3, 4, 5])
    writer.flush()
    self.assertLen(self.writes, 1)
    writer.write(6, "train", {"loss": 0.5})
    writer.close()
    self.assertEqual(self._steps(), [1, 2, 3, 4, 5, 6])
    writer = self._writer(start=3)
    writer.write(4, "train", {"loss": 0.5})
    writer.close()
    self.assertEqual(self._steps(), [1, 2, 3, 4])

  def test_file_is_written_after_a_while(self):
    with mock.patch.object(metrics, "_BUCKET_SECONDS", 0.0):
      writer = self._writer()
      writer.write(1, "train", {"loss": 0.5})
    self.assertEqual(self._steps(), [1])

  def test_events_need_no_package_of_the_cloud(self):
    (self.root / "tensorboard").mkdir()
    with mock.patch.object(record_writer, "GCS_ENABLED", False):
      writer = self._writer(tensorboard=True)
      writer.write(2, "train", {"loss": 0.5})
      writer.close()
    (file,) = (self.root / "tensorboard").iterdir()
    self.assertEqual(_events(file.read_bytes()), {("train/loss", 2): 0.5})

  def test_google_addresses_are_ours_too(self):
    workdir = mock.MagicMock()
    workdir.__str__.return_value = "gs://bucket/run"
    with mock.patch("tensorboardX.SummaryWriter"):
      metrics._Tensorboard(workdir, 0)
    factory = record_writer.REGISTERED_FACTORIES["gs"]
    file = factory.open("gs://bucket/x")
    self.assertIsInstance(file, metrics._EventFile)


if __name__ == "__main__":
  absltest.main()
