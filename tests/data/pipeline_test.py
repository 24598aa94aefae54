import dataclasses
import itertools
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl import logging
from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.data import image_folders, pipeline
from tests.data.text import tiny_sets

CONFIG = config_lib.Config(
  model=config_lib.ViTConfig(
    image_size=(8, 8),
    channels=1,
    num_classes=40,
    patch_stride=4,
    embed_dims=(8,),
    depths=(1,),
    num_heads=(2,),
    shared_heads=(1,),
    top_k=(1,),
    mlp_ratios=(2,),
    sr_ratios=(1,),
  ),
  data=config_lib.DataConfig(
    batch_size=4,
    augment="shift",
    mean=(0.5,),
    std=(0.5,),
    num_threads=2,
    prefetch=2,
  ),
  eval=config_lib.EvalConfig(batch_size=4),
)


class _Numbered:
  """Example i is a ramp of its own and has the label i."""

  class_names = tuple(map(str, range(40)))
  channels = 1

  def __init__(self, examples):
    self._examples = examples

  def __len__(self):
    return self._examples

  def __getitem__(self, index):
    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1) + np.uint8(
      index % 256
    )
    return {"image": image, "label": np.int32(index)}


def _batches(config=CONFIG, examples=10, position=0, count=8, rows=None):
  stream = tiny_sets.train_stream(config, _Numbered(examples), rows)
  if position:
    stream.seek(position)
  return list(itertools.islice(stream, count))


def _labels(batches):
  return np.concatenate([batch["label"] for batch in batches])


def _eval(config=CONFIG, examples=10, rows=None):
  return list(tiny_sets.eval_stream(config, _Numbered(examples), rows))


def _assert_equal(test, ours, theirs):
  test.assertEqual(len(ours), len(theirs))
  for a, b in zip(ours, theirs):
    test.assertEqual(a.keys(), b.keys())
    for name in a:
      np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class TrainBatchesTest(parameterized.TestCase):
  def test_batches_hold_images_and_labels(self):
    (batch,) = _batches(count=1)
    self.assertEqual(batch["image"].shape, (4, 8, 8, 1))
    self.assertEqual(batch["image"].dtype, np.uint8)
    self.assertEqual(batch["label"].shape, (4,))
    self.assertEqual(batch["label"].dtype, np.int32)

  def test_same_seed_same_batches(self):
    _assert_equal(self, _batches(), _batches())

  def test_number_of_threads_changes_nothing(self):
    one = config_lib.apply_overrides(CONFIG, "data", num_threads=1, prefetch=1)
    _assert_equal(self, _batches(), _batches(one))

  def test_more_threads_than_examples_ahead_are_no_warning(self):
    many = config_lib.apply_overrides(CONFIG, "data", num_threads=64)
    with mock.patch.object(logging, "warning") as warning:  # of grain
      _batches(many, count=1)
    warning.assert_not_called()

  def test_another_seed_another_order(self):
    other = config_lib.apply_overrides(CONFIG, "train", seed=1)
    ours, theirs = (
      _labels(_batches(examples=32)),
      _labels(_batches(other, examples=32)),
    )
    self.assertFalse(np.array_equal(ours, theirs))

  def test_another_seed_another_augmentation(self):
    other = config_lib.apply_overrides(CONFIG, "train", seed=1)
    ours, theirs = _batches(examples=1), _batches(other, examples=1)
    self.assertFalse(
      all(np.array_equal(a["image"], b["image"]) for a, b in zip(ours, theirs))
    )

  def test_every_epoch_is_a_permutation(self):
    labels = _labels(_batches(examples=10, count=10)).reshape(4, 10)
    for epoch in labels:
      self.assertCountEqual(epoch, range(10))

  def test_every_epoch_is_reshuffled(self):
    labels = _labels(_batches(examples=12, count=9)).reshape(3, 12)
    orders = {tuple(epoch) for epoch in labels}
    self.assertLen(orders, 3)
    self.assertNotIn(tuple(range(12)), orders)

  def test_an_example_is_augmented_anew_each_time(self):
    batches = _batches(examples=1, count=4)
    images = np.concatenate([batch["image"] for batch in batches])
    self.assertGreater(len(np.unique(images, axis=0)), 3)

  def test_examples_keep_their_labels(self):
    plain = config_lib.apply_overrides(CONFIG, "data", augment="none")
    for batch in _batches(plain):
      corner = batch["image"][:, 0, 0, 0]
      np.testing.assert_array_equal(corner, batch["label"])

  @parameterized.parameters(1, 3, 7)
  def test_seek_continues_an_uninterrupted_run(self, position):
    whole = _batches(count=10)
    rest = _batches(position=position, count=10 - position)
    _assert_equal(self, rest, whole[position:])

  def test_seek_goes_back(self):
    stream = tiny_sets.train_stream(CONFIG, _Numbered(10))
    first = list(itertools.islice(stream, 5))
    stream.seek(2)
    _assert_equal(self, list(itertools.islice(stream, 3)), first[2:])

  def test_position_counts_the_batches_taken(self):
    stream = tiny_sets.train_stream(CONFIG, _Numbered(10))
    self.assertEqual(stream.position, 0)
    for taken in range(1, 5):
      next(stream)
      self.assertEqual(stream.position, taken)
    stream.seek(40)
    next(stream)
    self.assertEqual(stream.position, 41)

  @parameterized.parameters(
    (((0, 1), (2, 3)),),
    (((0, 3), (1, 2)),),  # as the chips of a TPU slice may lie
    (((2,), (0,), (3,), (1,)),),
    (((0, 1, 2, 3), (0, 1, 2, 3)),),  # both hold the whole batch
  )
  def test_every_row_has_its_example_on_any_process(self, processes):
    whole = _batches()
    for rows in processes:
      for ours, theirs in zip(_batches(rows=rows), whole, strict=True):
        for name in theirs:
          np.testing.assert_array_equal(ours[name], theirs[name][list(rows)])

  def test_position_outlives_a_change_of_processes(self):
    whole = _batches(count=6)
    part = _batches(rows=(1, 2), position=4, count=2)
    for ours, theirs in zip(part, whole[4:], strict=True):
      np.testing.assert_array_equal(ours["image"], theirs["image"][[1, 2]])

  def test_unreadable_image_is_named(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    file = root / "train" / "ant" / "1.png"
    file.parent.mkdir(parents=True)
    file.write_text("no image")
    source = image_folders.ImageFolderSource(str(root), "train", 1)
    stream = tiny_sets.train_stream(CONFIG, source)
    with self.assertRaises(ValueError) as caught:
      next(stream)
    self.assertIn(str(file), str(caught.exception))


class RepeatsTest(parameterized.TestCase):
  def _labels(self, examples, repeats=3, count=8, **data):
    values = {"augment": "none", "repeats": repeats, **data}
    config = config_lib.apply_overrides(CONFIG, "data", **values)
    return _labels(_batches(config, examples, count=count))

  def test_copies_follow_one_another_and_are_augmented_apart(self):
    config = config_lib.apply_overrides(CONFIG, "data", repeats=3)
    batches = _batches(config, examples=30, count=6)
    labels = _labels(batches).reshape(8, 3)
    np.testing.assert_array_equal(labels, labels[:, :1].repeat(3, axis=1))
    self.assertLen(set(labels[:, 0]), 8)
    images = np.concatenate([batch["image"] for batch in batches])
    apart = [len(np.unique(part, axis=0)) for part in images.reshape(8, 3, -1)]
    self.assertGreater(np.mean(apart), 2)

  def test_epoch_has_a_third_of_the_images_three_times_each(self):
    labels = self._labels(30, count=15).reshape(2, 30)
    for epoch in labels:
      self.assertEqual(set(np.unique(epoch, return_counts=True)[1]), {3})
    self.assertNotEqual(set(labels[0]), set(labels[1]))

  def test_order_is_the_shuffled_one_of_an_epoch(self):
    plain, thrice = self._labels(300, 1, 150), self._labels(300, 3, 128)
    np.testing.assert_array_equal(thrice[:256], plain[:86].repeat(3)[:256])
    second = plain[300:386].repeat(3)[:256]
    np.testing.assert_array_equal(thrice[256:], second)

  def test_seek_and_rows_find_the_same_images(self):
    config = config_lib.apply_overrides(CONFIG, "data", repeats=3)
    whole = _batches(config, count=9)
    for rows in ((0, 2), (1, 3)):
      part = _batches(config, position=4, count=5, rows=rows)
      for ours, theirs in zip(part, whole[4:], strict=True):
        for name in theirs:
          np.testing.assert_array_equal(ours[name], theirs[name][list(rows)])


@pytest.mark.slow
class WorkersTest(parameterized.TestCase):
  def test_processes_make_the_batches_of_threads(self):
    # Worker processes start from a file, so each number has a program.
    said = [
      subprocess.run(
        [sys.executable, "-m", "tests.data.worker_stream", str(workers), "6"],
        capture_output=True,
        check=True,
        text=True,
      ).stdout
      for workers in (0, 1, 2)
    ]
    self.assertLen(said[0].splitlines(), 9)
    self.assertEqual(said[0].splitlines()[3:6], said[0].splitlines()[6:])
    self.assertEqual(said[1:], said[:1] * 2)

  def test_number_follows_the_host(self):
    text = config_lib.TextDataConfig()
    for cpus, expected in ((2, 0), (64, 4), (1000, 8)):
      with mock.patch.object(
        pipeline.os, "sched_getaffinity", return_value=range(cpus), create=True
      ):
        self.assertEqual(pipeline.worker_count(CONFIG.data), expected)
        self.assertEqual(pipeline.worker_count(text), 0)


class SharedMemoryTest(absltest.TestCase):
  def _workers(self, workers, free):
    data = dataclasses.replace(CONFIG.data, workers=workers)
    with (
      mock.patch.object(pipeline, "_SHARED_MEMORY", "/"),
      mock.patch.object(pipeline.shutil, "disk_usage") as usage,
      mock.patch.object(
        pipeline.os, "sched_getaffinity", return_value=range(64), create=True
      ),
    ):
      usage.return_value.free = free
      return pipeline.workers_with_room(data, 10_000_000)

  def test_processes_have_room_for_their_batches(self):
    self.assertEqual(self._workers(4, 120_000_000), 4)
    with self.assertRaisesRegex(
      ValueError, "data.workers=4: must be at most 3: / has 119 MB free"
    ):
      self._workers(4, 119_000_000)

  def test_default_takes_what_there_is(self):
    self.assertEqual(self._workers(None, 10**9), 4)
    with self.assertLogs(pipeline._log, "WARNING") as logs:
      self.assertEqual(self._workers(None, 64_000_000), 2)
      self.assertEqual(self._workers(None, 0), 0)
    self.assertIn("2 processes make batches, not 4", logs.output[0])


class EvalBatchesTest(parameterized.TestCase):
  @parameterized.parameters(10, 8, 3, 1)
  def test_covers_every_example_once_in_order(self, examples):
    batches = _eval(examples=examples)
    masks = np.concatenate([batch["mask"] for batch in batches]) > 0
    labels = _labels(batches)
    np.testing.assert_array_equal(labels[masks], np.arange(examples))
    self.assertLen(batches, -(-examples // 4))

  @parameterized.parameters(
    (4, (0, 2, 5, 7)), (1, (0,)), (9, (0, 1, 2, 3, 4, 5, 6, 7, 8)), (99, None)
  )
  def test_some_examples_are_spread_over_the_split(self, most, places):
    config = config_lib.apply_overrides(CONFIG, "eval", examples=most)
    batches = _eval(config, examples=10)
    masks = np.concatenate([batch["mask"] for batch in batches]) > 0
    places = range(10) if places is None else places
    np.testing.assert_array_equal(_labels(batches)[masks], places)
    index = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(index[masks], places)

  def test_padding_is_zero_and_masked(self):
    last = _eval(examples=10)[-1]
    np.testing.assert_array_equal(last["mask"], [1, 1, 0, 0])
    np.testing.assert_array_equal(last["image"][2:], 0)
    np.testing.assert_array_equal(last["label"][2:], 0)
    self.assertEqual(last["mask"].dtype, np.float32)

  def test_is_neither_shuffled_nor_random(self):
    _assert_equal(self, _eval(), _eval())
    other = config_lib.apply_overrides(CONFIG, "train", seed=1)
    _assert_equal(self, _eval(), _eval(other))

  def test_images_are_resized(self):
    model = dataclasses.replace(CONFIG.model, image_size=(12, 4))
    config = dataclasses.replace(CONFIG, model=model)
    batch = _eval(config)[0]
    self.assertEqual(batch["image"].shape, (4, 12, 4, 1))
    self.assertEqual(batch["image"].dtype, np.uint8)

  @parameterized.product(
    processes=(((0, 3), (1, 2)), ((0,), (1,), (2,), (3,))),
    examples=(10, 1, 16),
  )
  def test_every_row_has_its_example_on_any_process(self, processes, examples):
    whole = _eval(examples=examples)
    for rows in processes:
      part = _eval(examples=examples, rows=rows)
      for ours, theirs in zip(part, whole, strict=True):
        for name in theirs:
          np.testing.assert_array_equal(ours[name], theirs[name][list(rows)])


if __name__ == "__main__":
  absltest.main()
