import dataclasses
import logging

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image
from sklearn import datasets

from moh_jax.config import Config, DataConfig
from moh_jax.data import image_folders, sources
from tests.data import tiny_sets
from tests.data.folder import FolderTest

_MODEL = dataclasses.replace(tiny_sets.VIT, image_size=(8, 12), num_classes=2)
_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


def _write(path, pixels=_RGB, **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path, **options)
  return path


class DigitsSourceTest(parameterized.TestCase):
  def test_splits_hold_every_scan_once(self):
    ours = []
    for split in sources.SPLITS:
      source = sources.DigitsSource(None, split)
      for i in range(len(source)):
        element = source[i]
        row = (*element["image"].ravel().tolist(), int(element["label"]))
        ours.append(row)
    digits = datasets.load_digits()
    pixels = np.round(digits.images.reshape(-1, 64) * 255 / 16).astype(int)
    theirs = [(*x, y) for x, y in zip(pixels.tolist(), digits.target.tolist())]
    self.assertCountEqual(ours, theirs)


class ClassNamesTest(FolderTest):
  def _labels(self, *folders, names, split="val"):
    for folder in folders:
      _write(self.root / split / folder / "1.png")
    source = image_folders.ImageFolderSource(
      str(self.root), split, 3, image_folders.Selection(class_names=names)
    )
    self.assertEqual(source.class_names[: len(names)], names)
    return {
      source.name(i).partition("/")[0]: int(source[i]["label"])
      for i in range(len(source))
    }

  def test_class_that_the_model_lacks_is_named(self):
    with self.assertRaisesRegex(
      ValueError, r"'dog' is none .* 1 classes \(ant"
    ):
      self._labels("ant", "dog", names=("ant",))

  def test_folders_named_by_numbers_are_labels(self):
    names = tuple(f"n{i:02}" for i in range(12))
    folders = [str(i) for i in range(12)]
    expected = {str(i): i for i in range(12)}
    self.assertEqual(self._labels(*folders, names=names), expected)
    self.assertEqual(self._labels(*folders, names=()), expected)
    with self.assertRaisesRegex(ValueError, "'11' is none of .* 11 classes"):
      self._labels(names=names[:11])


def _config(model=_MODEL, **data):
  return Config(model=model, data=DataConfig(**data))


class MakeSourceTest(FolderTest):
  def test_check_names_all_bad_images_at_once(self):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.png")
    (self.root / "train/ant/0.png").write_text("no image")
    (self.root / "train/cat/2.png").symlink_to(self.root / "gone.png")
    config = _config(
      source="image_folder", path=str(self.root), bad_images="check"
    )
    found = ".*ant/0.png: not .*; .*cat/2.png: a broken link; "
    advice = "remove them, or leave them out with data.bad_images='skip'"
    with self.assertRaisesRegex(ValueError, "2 of 4 images " + found + advice):
      sources.make_source(config, "train")
    for name in ("ant/0.png", "cat/2.png"):
      (self.root / "train" / name).unlink()
    self.assertLen(sources.make_source(config, "train"), 2)

  def test_skipping_is_for_training_alone(self):
    for split in sources.SPLITS:
      for folder in ("ant", "cat"):
        _write(self.root / split / folder / "1.png")
      (self.root / split / "ant" / "0.png").write_text("no image")
    config = _config(
      source="image_folder", path=str(self.root), bad_images="skip"
    )
    train = sources.make_source(config, "train")
    np.testing.assert_array_equal(train[0]["image"], _RGB)
    # Before the first step, not at the first evaluation.
    with self.assertRaisesRegex(
      ValueError, "ant/0.png: not an image .*; remove them: .*'skip' is for"
    ):
      sources.make_source(config, "val")

  def test_centre_crop_needs_large_images(self):
    _write(self.root / "train/ant/1.png")
    _write(self.root / "train/cat/1.png", np.zeros((8, 12, 3), np.uint8))
    for augment, refused in (("crop_flip", False), ("center_flip", True)):
      config = _config(
        source="image_folder", path=str(self.root), augment=augment
      )
      source = sources.make_source(config, "train")
      if not refused:
        self.assertEqual(source[0]["image"].shape, (6, 5, 3))
        continue
      with self.assertRaisesRegex(
        ValueError, "ant/1.png: 6 x 5 pixels .* at least 8 x 12 needed"
      ):
        source[0]
      self.assertEqual(source[1]["image"].shape, (8, 12, 3))


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

  def test_next_good_image_takes_its_place(self):
    source = sources.CheckedSource(_Source({1, 2, 5}), skip=True)
    self.assertLen(source, 6)
    for _ in range(2):
      self.assertEqual(_labels(source), [0, 3, 3, 3, 4, 0])

  def test_nothing_but_bad_images_ends(self):
    source = sources.CheckedSource(_Source(set(range(6))), skip=True)
    with self.assertRaisesRegex(ValueError, "none of the 6 images can be read"):
      source[0]


if __name__ == "__main__":
  absltest.main()
