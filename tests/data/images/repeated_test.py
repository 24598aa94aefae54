import collections
import concurrent.futures
import pickle
import threading

import grain
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data.pipeline import RepeatedImages
from tests.data.images import operations_test


class _Slow:
  """Examples whose readers wait for one another, and how often each is read."""

  def __init__(self, size, together, broken=-1):
    self._size, self._lock = size, threading.Lock()
    self._broken = broken
    self._barrier = threading.Barrier(together)
    self.reads = collections.Counter()

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    with self._lock:
      self.reads[index] += 1
    if index == self._broken:
      raise ValueError(f"image {index} is broken")
    self._barrier.wait(30)
    return index


def _images(size):
  return grain.MapDataset.range(size).seed(0).shuffle()


class RepeatedImagesTest(parameterized.TestCase):
  def test_epochs_are_as_long_as_timms(self):
    with np.load(operations_test.FILE) as file:
      lengths = dict(zip(file["sizes"].tolist(), file["epochs"].tolist()))
    self.assertEqual(lengths[1_281_167], 1251 * 1024)
    for size, length in lengths.items():
      self.assertLen(RepeatedImages(_images(size), 3), length)

  @parameterized.parameters(2, 3, 5)
  def test_order_is_the_shuffled_one_of_each_epoch(self, copies):
    images = _images(300)
    repeated = RepeatedImages(images, copies)
    for index in (0, 1, 2, 100, 255, 256, 300, 511, 512, 5 * 256 + 7):
      epoch, place = divmod(index, 256)
      self.assertEqual(repeated[index], images[epoch * 300 + place // copies])

  def test_threads_read_an_image_once_for_its_copies(self):
    # Four threads read four images at a time, or the barrier breaks.
    source = _Slow(12, together=4)
    repeated = RepeatedImages(grain.MapDataset.source(source), 3)
    repeated = repeated.repeat()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      for start in range(0, 36, 12):
        found = list(pool.map(repeated.__getitem__, range(start, start + 12)))
        self.assertEqual(found, list(np.repeat(range(4), 3)))
    self.assertEqual(
      source.reads, collections.Counter({i: 3 for i in range(4)})
    )

  def test_a_broken_image_is_an_error_for_each_copy(self):
    source = _Slow(20, together=1, broken=1)
    repeated = RepeatedImages(grain.MapDataset.source(source), 3)
    for index in (3, 4, 5):
      with self.assertRaisesRegex(ValueError, "image 1 is broken"):
        repeated[index]
    self.assertEqual([repeated[2], repeated[6]], [0, 2])

  def test_an_image_that_can_be_read_again_is_no_error(self):
    source = _Slow(20, together=1, broken=1)
    repeated = RepeatedImages(grain.MapDataset.source(source), 3)
    with self.assertRaisesRegex(ValueError, "image 1 is broken"):
      repeated[3]
    source._broken = -1
    self.assertEqual([repeated[i] for i in (3, 4, 5)], [1, 1, 1])

  def test_few_images_wait_for_copies_that_nobody_asks_for(self):
    repeated = RepeatedImages(_images(1000), 3)
    for index in range(0, 768, 3):
      repeated[index]
    self.assertLessEqual(len(repeated._reads), 32)

  def test_pickles(self):
    repeated = RepeatedImages(_images(300), 3)
    repeated[4]
    copy = pickle.loads(pickle.dumps(repeated))
    self.assertEqual(
      [copy[i] for i in range(9)], [repeated[i] for i in range(9)]
    )


if __name__ == "__main__":
  absltest.main()
