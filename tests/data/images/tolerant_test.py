import logging
import pickle

import numpy as np
from absl.testing import absltest

from moh_jax.data import sources


class _Source:
  class_names = ("ant",)
  channels = 1

  def __init__(self, bad, size=6):
    self._bad, self._size = bad, size

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    if index in self._bad:
      raise ValueError(f"ant/{index}.png: damaged")
    return {"image": np.zeros((4, 5, 1), np.uint8), "label": np.int32(index)}

  def name(self, index):
    return f"ant/{index}.png"


def _labels(source):
  return [int(source[i]["label"]) for i in range(len(source))]


class CheckedSourceTest(absltest.TestCase):
  def test_bad_image_raises_its_own_error(self):
    source = sources.CheckedSource(_Source({2}), skip=False)
    self.assertEqual(source[1]["label"], 1)
    with self.assertRaisesRegex(ValueError, "ant/2.png: damaged"):
      source[2]

  def test_next_good_image_takes_its_place(self):
    source = sources.CheckedSource(_Source({1, 2, 5}), skip=True)
    self.assertLen(source, 6)
    for _ in range(2):
      self.assertEqual(_labels(source), [0, 3, 3, 3, 4, 0])

  def test_each_bad_image_is_counted_once(self):
    source = sources.CheckedSource(_Source({1, 2}), skip=True)
    with self.assertLogs("moh_jax.data.sources", logging.WARNING) as logs:
      _labels(source)
      _labels(source)
    self.assertEqual(
      [record.getMessage() for record in logs.records],
      [
        "skipped ant/1.png: damaged (1 so far)",
        "skipped ant/2.png: damaged (2 so far)",
      ],
    )

  def test_nothing_but_bad_images_ends(self):
    source = sources.CheckedSource(_Source(set(range(6))), skip=True)
    with self.assertRaisesRegex(ValueError, "none of the 6 images can be read"):
      source[0]

  def test_small_images_are_bad(self):
    fits = sources.CheckedSource(_Source(()), skip=False, smallest=(4, 5))
    self.assertEqual(fits[1]["label"], 1)
    for smallest in ((5, 5), (4, 6)):
      source = sources.CheckedSource(_Source(()), skip=False, smallest=smallest)
      with self.assertRaisesRegex(
        ValueError,
        rf"ant/1.png: 4 x 5 .* {smallest[0]} x {smallest[1]} needed",
      ):
        source[1]

  def test_pickles(self):
    source = sources.CheckedSource(_Source({1}), skip=True)
    labels = _labels(source)
    self.assertEqual(_labels(pickle.loads(pickle.dumps(source))), labels)


if __name__ == "__main__":
  absltest.main()
