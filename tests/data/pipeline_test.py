"""Batches: their order, their rows by process, repeated images."""

import dataclasses
import functools
import hashlib
import itertools
import sys
from unittest import mock

import grain
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.data import pipeline, sources
from moh_jax.data.pipeline import RepeatedImages
from tests.data import tiny_sets, transforms_test
from tests.training import tiny
from tests.two_processes import python

_FEW = {"num_threads": 2, "prefetch": 2, "mean": (0.5,), "std": (0.5,)}
CONFIG = tiny.config(
  model={"num_classes": 40},
  data={"batch_size": 4, **_FEW},
  eval={"batch_size": 4},
)


class _Numbered:
  """Example i is a ramp of its own and has the label i."""

  def __init__(self, examples):
    self._examples = examples

  def __len__(self):
    return self._examples

  def __getitem__(self, index):
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1) + np.uint8(index)
    return {"image": image, "label": np.int32(index)}


def _batches(rows=None):
  stream = tiny_sets.train_stream(CONFIG, _Numbered(10), rows)
  return list(itertools.islice(stream, 8))


def _eval(config=CONFIG, examples=10, rows=None):
  return list(tiny_sets.eval_stream(config, _Numbered(examples), rows))


def _print_digests(workers, count):
  """Of batches from 0 and from 3 on: those of an uninterrupted stream."""
  data = {"batch_size": 4, "augment": "crop_flip", "random_erasing": 0.5}
  config = tiny.config(data={**data, "repeats": 3, "workers": workers})
  source = sources.make_source(config, "train")
  stream = tiny_sets.train_stream(config, source, (2, 3))
  for start in (0, 3):
    stream.seek(start)
    for batch in itertools.islice(stream, count - start):
      bits = batch["image"].tobytes() + batch["label"].tobytes()
      print(stream.position, hashlib.sha256(bits).hexdigest())
  stream.close()


@pytest.mark.slow
class WorkersTest(parameterized.TestCase):
  def test_processes_make_the_batches_of_threads(self):
    # Worker processes start from a file, so each number has a program.
    argv = "-m", "tests.data.pipeline_test"
    said = [python(*argv, workers, 6)[1] for workers in (0, 1, 2)]
    self.assertLen(said[0].splitlines(), 9)
    self.assertEqual(said[0].splitlines()[3:6], said[0].splitlines()[6:])
    self.assertEqual(said[1:], said[:1] * 2)


class WorkerCountTest(absltest.TestCase):
  def test_processes_have_room_for_their_batches(self):
    image = {"image": np.zeros(5_000_000, np.uint16)}
    with (
      mock.patch.object(pipeline.os, "sched_getaffinity", lambda _: range(64)),
      mock.patch.object(pipeline.shutil, "disk_usage") as usage,
    ):
      for free, workers in ((120, 4), (119, 3), (10, 0)):
        usage.return_value.free = free * 10**6
        found = pipeline.worker_count(CONFIG.data, [image], 1)
        self.assertEqual(found, workers)
      asked = dataclasses.replace(CONFIG.data, workers=9)
      self.assertEqual(pipeline.worker_count(asked, [image], 1), 9)


class RowsTest(parameterized.TestCase):
  @parameterized.product(
    batches=(
      _batches,
      *(functools.partial(_eval, examples=n) for n in (10, 1, 16)),
    ),
    processes=(
      ((0, 1), (2, 3)),
      ((0, 3), (1, 2)),  # as the chips of a TPU slice may lie
      ((2,), (0,), (3,), (1,)),
      ((0, 1, 2, 3), (0, 1, 2, 3)),  # both hold the whole batch
    ),
  )
  def test_every_row_has_its_example_on_any_process(self, batches, processes):
    whole = batches()
    for rows in processes:
      for ours, theirs in zip(batches(rows=rows), whole, strict=True):
        own = {name: x[list(rows)] for name, x in theirs.items()}
        np.testing.assert_equal(ours, own)


class EvalBatchesTest(parameterized.TestCase):
  @parameterized.parameters(
    *((0, n, range(n)) for n in (10, 8, 3, 1)),
    (4, 10, (0, 2, 5, 7)),
    (1, 10, (0,)),
    (9, 10, range(9)),
    (99, 10, range(10)),
  )
  def test_examples_are_spread_over_the_split_in_order(
    self, most, examples, places
  ):
    config = config_lib.apply_overrides(CONFIG, "eval", examples=most)
    batches = _eval(config, examples)
    self.assertLen(batches, -(-len(places) // 4))
    masks = np.concatenate([batch["mask"] for batch in batches]) > 0
    for name in ("label", "index"):
      found = np.concatenate([batch[name] for batch in batches])
      np.testing.assert_array_equal(found[masks], places)


def _images(size):
  return grain.MapDataset.range(size).seed(0).shuffle()


class RepeatedImagesTest(parameterized.TestCase):
  def test_epochs_are_as_long_as_timms(self):
    with np.load(transforms_test.FILE) as file:
      lengths = dict(zip(file["sizes"].tolist(), file["epochs"].tolist()))
    self.assertEqual(lengths[1_281_167], 1251 * 1024)
    for size, length in lengths.items():
      self.assertLen(RepeatedImages(_images(size), 3), length)


if __name__ == "__main__":
  _print_digests(*map(int, sys.argv[1:]))
