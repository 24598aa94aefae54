import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data.images import files as images

_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


def _write(path, pixels=_RGB, **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path, **options)
  return path


class _TempDirTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))


class ReadImageTest(_TempDirTest):
  @parameterized.parameters("png", "bmp", "tiff", "webp")
  def test_lossless_formats_keep_every_pixel(self, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    path = _write(self.root / f"x.{suffix}", **options)
    np.testing.assert_array_equal(images.read_image(path, 3), _RGB)

  def test_jpeg_keeps_size_and_mean(self):
    path = _write(self.root / "x.jpg", np.full((9, 7, 3), 100, np.uint8))
    image = images.read_image(path, 3)
    self.assertEqual(image.shape, (9, 7, 3))
    np.testing.assert_allclose(image, 100, atol=2)

  def test_grey_becomes_three_equal_channels(self):
    path = _write(self.root / "x.png", _RGB[..., 0])
    image = images.read_image(path, 3)
    for channel in range(3):
      np.testing.assert_array_equal(image[..., channel], _RGB[..., 0])

  def test_rgb_becomes_luma(self):
    path = _write(self.root / "x.png")
    image = images.read_image(path, 1)
    luma = _RGB @ np.array([0.299, 0.587, 0.114])
    self.assertEqual(image.shape, (6, 5, 1))
    np.testing.assert_allclose(image[..., 0], luma, atol=1)

  def test_palette_gives_its_colours(self):
    path = self.root / "x.png"
    colours = np.array([[200, 10, 30], [5, 250, 90]], np.uint8)
    index = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
    picture = Image.fromarray(index).convert("P")
    picture.putpalette(colours.ravel().tolist())
    picture.save(path)
    np.testing.assert_array_equal(images.read_image(path, 3), colours[index])

  def test_palette_with_transparency_is_read_quietly(self):
    path = self.root / "x.png"
    picture = Image.fromarray(_RGB[..., 0]).convert("P")
    picture.save(path, transparency=bytes([0, 128, 255]))
    self.assertEqual(images.read_image(path, 3).shape, (6, 5, 3))

  def test_alpha_is_dropped(self):
    rgba = np.concatenate([_RGB, np.full((6, 5, 1), 7, np.uint8)], -1)
    path = _write(self.root / "x.png", rgba)
    np.testing.assert_array_equal(images.read_image(path, 3), _RGB)

  def test_two_bytes_a_pixel_are_scaled_to_one(self):
    deep = np.array([[0, 0x4080], [0x80FF, 0xFFFF]], np.uint16)
    path = _write(self.root / "x.png", deep)
    image = images.read_image(path, 1)[..., 0]
    np.testing.assert_allclose(image, deep / 257, atol=1)

  def test_result_has_rows_first(self):
    path = _write(self.root / "x.png", np.zeros((4, 16, 3), np.uint8))
    self.assertEqual(images.read_image(path, 3).shape, (4, 16, 3))

  def test_truncated_tiff_gives_one_error_and_no_warning(self):
    path = _write(self.root / "x.tiff")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with self.assertRaises(ValueError) as caught:
      images.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters("png", "jpg", "bmp", "gif", "webp")
  def test_truncated_file_is_named(self, suffix):
    path = _write(self.root / f"x.{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with self.assertRaises(ValueError) as caught:
      images.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters(b"", b"some text\n", b"\x89PNG\r\n\x1a\n")
  def test_file_that_is_no_image_is_named(self, content):
    path = self.root / "x.png"
    path.write_bytes(content)
    with self.assertRaises(ValueError) as caught:
      images.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters("nope.png", ".")
  def test_missing_file_is_named(self, name):
    path = self.root / name
    with self.assertRaisesRegex(FileNotFoundError, "no such image file") as e:
      images.read_image(path, 3)
    self.assertIn(str(path), str(e.exception))

  def test_other_channels_are_refused(self):
    with self.assertRaisesRegex(ValueError, "1 or 3 channels.* has 4"):
      images.read_image(_write(self.root / "x.png"), 4)

  def test_bytes_of_a_file_decode_to_the_same_pixels(self):
    path = _write(self.root / "x.jpg")
    decoded = images.decode_image(path.read_bytes(), 3, "x")
    np.testing.assert_array_equal(decoded, images.read_image(path, 3))

  def test_bytes_that_are_no_image_are_named(self):
    with self.assertRaisesRegex(ValueError, "^ant/7: not an image"):
      images.decode_image(b"text", 3, "ant/7")


class FindSplitsTest(_TempDirTest):
  def test_folder_of_classes_is_one_split(self):
    _write(self.root / "ant" / "1.png")
    self.assertEqual(images.find_splits(self.root), {"train": self.root})
    self.assertEqual(images.find_splits(self.root, "val"), {"val": self.root})

  def test_splits_are_found_and_chosen(self):
    for split in ("train", "val"):
      _write(self.root / split / "ant" / "1.png")
    found = {split: self.root / split for split in ("train", "val")}
    self.assertEqual(images.find_splits(self.root), found)
    self.assertEqual(
      images.find_splits(self.root, "val"), {"val": self.root / "val"}
    )

  def test_class_may_be_called_train(self):
    for name in ("bus", "train"):
      _write(self.root / name / "1.png")
    self.assertEqual(images.find_splits(self.root), {"train": self.root})

  def test_missing_split_is_named(self):
    _write(self.root / "train" / "ant" / "1.png")
    with self.assertRaisesRegex(FileNotFoundError, r"no split 'val', only"):
      images.find_splits(self.root, "val")

  def test_missing_directory_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nope: no such directory"):
      images.find_splits(self.root / "nope")


class FingerprintTest(absltest.TestCase):
  def test_depends_on_names_labels_and_order(self):
    lists = (
      [("ant/1", 0), ("cat/1", 1)],
      [("cat/1", 1), ("ant/1", 0)],
      [("ant/1", 0), ("cat/2", 1)],
      [("ant/1", 0), ("cat/1", 2)],
      [("ant/1", 0)],
    )
    self.assertLen({images.fingerprint(files) for files in lists}, len(lists))
    self.assertStartsWith(images.fingerprint(lists[0]), "2 files, sha256 ")


if __name__ == "__main__":
  absltest.main()
