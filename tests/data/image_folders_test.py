"""Folders of images: splits, classes, the held-out share."""

import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.config import Config, ViTConfig
from moh_jax.data import image_folders, sources
from tests.data.folder import FolderTest


def _write(path):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(path)
  return path


class ListImagesTest(FolderTest):
  def test_hidden_files_and_folders_are_left_out(self):
    for name in ("ant/1.png", "ant/._1.png", ".cache/2.png", "cat/3.png"):
      _write(self.root / name)
    names, files = image_folders.list_images(self.root)
    self.assertEqual(names, ("ant", "cat"))
    self.assertEqual(files, [("ant/1.png", 0), ("cat/3.png", 1)])

  def test_other_files_are_left_out_with_one_warning(self):
    for name in ("a/1.png", "a/2.HEIC", "a/labels.txt", "b/1.jpg", "3.png"):
      path = self.root / name
      path.parent.mkdir(exist_ok=True)
      path.touch()
    (self.root / "classes.txt").touch()  # no image, and in no class
    (self.root / "a/below").mkdir()
    with self.assertLogs(image_folders._LOG, "WARNING") as logs:
      for _ in range(2):
        self.assertLen(image_folders.list_images(self.root)[1], 2)
    self.assertLen(logs.output, 1)
    self.assertIn("out 4 files or folders, 'a/2.HEIC' for", logs.output[0])

  def test_empty_class_is_named(self):
    _write(self.root / "ant" / "1.png")
    (self.root / "dog").mkdir()
    (self.root / "dog" / "notes.txt").write_text("no image")
    with self.assertRaisesRegex(ValueError, "class folder 'dog' holds no"):
      image_folders.list_images(self.root)

  def test_flat_folder_is_one_class(self):
    for name in ("b.png", "a.png"):
      _write(self.root / name)
    names, files = image_folders.list_images(self.root)
    self.assertLen(names, 1)
    self.assertEqual(files, [("a.png", 0), ("b.png", 0)])


class ListSplitTest(FolderTest):
  def _names(self, split, share=0.25):
    _, _, files = image_folders.list_split(self.root, split, share)
    return {name for name, _ in files}

  def _write_many(self, count, prefix=""):
    for name in ("ant", "bee"):
      for i in range(count):
        _write(self.root / prefix / name / f"{i}.png")

  @parameterized.parameters("", "train")
  def test_share_cuts_the_images_in_two(self, prefix):
    self._write_many(60, prefix)
    train, val = self._names("train"), self._names("val")
    self.assertEqual(train & val, set())
    self.assertLen(train | val, 120)
    self.assertBetween(len(val), 15, 45)

  def test_further_images_move_none(self):
    self._write_many(20)
    train, val = self._names("train"), self._names("val")
    self._write_many(50)
    for i in range(50):
      _write(self.root / "cow" / f"{i}.png")
    self.assertLess(train, self._names("train"))
    self.assertLess(val, self._names("val"))

  @parameterized.parameters("test", "Test", "validation", "dev")
  def test_other_splits_are_no_classes(self, other):
    for name in ("train/1.png", "val/2.png", f"{other}/3.png"):
      _write(self.root / name)
    self.assertEqual(self._names("train", 0.0), {"1.png"})
    self.assertEqual(self._names("val", 0.0), {"2.png"})

  def test_class_without_training_images_is_named(self):
    self._write_many(3)
    with self.assertRaisesRegex(ValueError, "val_share=1.0 .* class 'ant'"):
      self._names("train", 1.0)

  def test_share_that_holds_out_nothing_is_named(self):
    self._write_many(1)
    with self.assertRaisesRegex(ValueError, "val_share=1e-06 .* no image"):
      self._names("val", 1e-6)


class FindFilesTest(FolderTest):
  def test_finds_all_formats_and_warns_of_others(self):
    for suffix in ("ppm", "tga", "jp2", "ico", "pcx", "PGM"):
      _write(self.root / f"1.{suffix}")
    for name in ("1.heic", "2.h5", ".hidden"):
      (self.root / name).write_text("no image that Pillow decodes")
    with self.assertLogs(image_folders._LOG, "WARNING") as logs:
      found = image_folders.find_images([str(self.root)])
    self.assertLen(found, 6)
    self.assertIn("left out 2 files or folders", logs.output[0])


class FindSplitsTest(FolderTest):
  def test_class_may_be_called_train(self):
    for name in ("bus", "train"):
      _write(self.root / name / "1.png")
    self.assertEqual(image_folders.find_splits(self.root), {"train": self.root})


def _config(data):
  return Config(model=ViTConfig(), data=data)


class ClassListTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.file = self.root / "synsets.txt"

  def test_first_words_are_the_names(self):
    self.file.write_text("n02 tench, Tinca tinca\r\n\n  n01\nn03\tbee\n")
    listed = sources.listed_classes(str(self.file))
    names, _ = sources.match_classes(("n01",), listed, "x")
    self.assertEqual(names, ("n02", "n01", "n03"))

  def test_whole_lines_are_names_of_classes_that_were_found(self):
    self.file.write_text("polar bear\nbrown bear\npolar fox, white\n")
    listed = sources.listed_classes(str(self.file))
    found = ("brown bear", "polar", "polar bear")
    names, labels = sources.match_classes(found, listed, "x")
    self.assertEqual(names, ("polar bear", "brown bear", "polar"))
    self.assertEqual(labels, [1, 2, 0])

  @parameterized.parameters(
    (("00", "01", "11"), tuple("abcdefghijkl"), [0, 1, 11]),
    (("00", "01", "10"), ("0", "1", "10", "2"), [0, 1, 2]),
    (("1", "02", "11"), tuple(map(str, range(12))), [1, 2, 11]),
    (("01", "7"), ("1", "dog", "7"), [0, 2]),
  )
  def test_zeros_before_numbers_do_not_matter(self, found, wanted, labels):
    ours = sources.match_classes(found, wanted, "x")
    self.assertEqual(ours, (wanted, labels))

  def test_a_number_that_is_there_twice_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'01', '1'.* have a number twice"):
      sources.match_classes(("01", "1"), ("ant", "bee"), "x")

  @parameterized.parameters(
    (b"", "names no class"),
    (b"\n \n", "names no class"),
    (b"ant\nbee\nant x\n", "class 'ant' is there twice"),
    (b"\xff\xfe", "not UTF-8"),
  )
  def test_bad_lists_are_named(self, content, message):
    self.file.write_bytes(content)
    with self.assertRaisesRegex(ValueError, f"class_list=.*{message}"):
      sources.match_classes((), sources.listed_classes(str(self.file)), "x")


if __name__ == "__main__":
  absltest.main()
