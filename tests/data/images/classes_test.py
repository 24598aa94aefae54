import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.config import Config, DataConfig, ViTConfig
from moh_jax.data import image_folders
from moh_jax.data.image_folders import ImageFolderSource


def _config(data):
  return Config(model=ViTConfig(), data=data)


class ClassListTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.file = self.root / "synsets.txt"

  def test_first_words_are_the_names(self):
    self.file.write_text("n02 tench, Tinca tinca\r\n\n  n01\nn03\tbee\n")
    listed = image_folders.listed_classes(str(self.file))
    self.assertEqual(listed.names(()), ("n02", "n01", "n03"))

  def test_whole_lines_are_names_of_classes_that_were_found(self):
    self.file.write_text("polar bear\nbrown bear\npolar fox, white\n")
    listed = image_folders.listed_classes(str(self.file))
    found = ("brown bear", "polar", "polar bear")
    names, labels = image_folders.match_classes(found, listed, "x")
    self.assertEqual(names, ("polar bear", "brown bear", "polar"))
    self.assertEqual(labels, [1, 2, 0])

  @parameterized.parameters(
    (("00", "01", "11"), tuple("abcdefghijkl"), [0, 1, 11]),
    (("00", "01", "10"), ("0", "1", "10", "2"), [0, 1, 2]),
    (("1", "02", "11"), tuple(map(str, range(12))), [1, 2, 11]),
    (("01", "7"), ("1", "dog", "7"), [0, 2]),
  )
  def test_zeros_before_numbers_do_not_matter(self, found, wanted, labels):
    ours = image_folders.match_classes(found, wanted, "x")
    self.assertEqual(ours, (wanted, labels))

  def test_a_number_that_is_there_twice_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'01', '1'.* have a number twice"):
      image_folders.match_classes(("01", "1"), ("ant", "bee"), "x")

  @parameterized.parameters(
    (b"", "names no class"),
    (b"\n \n", "names no class"),
    (b"ant\nbee\nant x\n", "class 'ant' is there twice"),
    (b"\xff\xfe", "not UTF-8"),
  )
  def test_bad_lists_are_named(self, content, message):
    self.file.write_bytes(content)
    with self.assertRaisesRegex(ValueError, f"class_list=.*{message}"):
      image_folders.listed_classes(str(self.file)).names(())

  def test_missing_list_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nope.txt.*no such file"):
      image_folders.listed_classes(str(self.root / "nope.txt"))

  def test_labels_of_folders_are_the_lists(self):
    for split in ("train", "val"):
      for name in ("ant", "bee", "cat"):
        path = self.root / split / name / "1.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)
    self.file.write_text("cat\nant\nbee\n")
    data = DataConfig(
      source="image_folder", path=str(self.root), class_list=str(self.file)
    )
    for split in ("train", "val"):
      source = ImageFolderSource.open(_config(data), split)
      self.assertEqual(source.class_names, ("cat", "ant", "bee"))
      self.assertEqual([int(source[i]["label"]) for i in range(3)], [1, 2, 0])
    alphabetical = DataConfig(source="image_folder", path=str(self.root))
    other = ImageFolderSource.open(_config(alphabetical), "train")
    self.assertNotEqual(other.identity(), source.identity())
    self.file.write_text("cat\nant\n")
    with self.assertRaisesRegex(
      ValueError, "folder 'bee' is none .*class_list="
    ):
      ImageFolderSource.open(_config(data), "train")


if __name__ == "__main__":
  absltest.main()
