import pathlib
import re

import numpy as np
from absl.testing import absltest, parameterized
from PIL import ExifTags, Image

from moh_jax.evaluation.image_sets import open_images

_IMAGES = np.random.RandomState(0).randint(0, 256, (7, 6, 5, 3), np.uint8)


def _read(images, batch_size=3):
  return np.concatenate(list(images.batches(batch_size)))


def _sorted(images):
  return sorted(image.tobytes() for image in images)


class ImageSetTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.file = self.root / "images.npz"

  def _refused(self, pattern, path=None, error=ValueError):
    path = path or self.file
    with self.assertRaisesRegex(error, f"{re.escape(str(path))}.*{pattern}"):
      open_images(path)


class NpzTest(ImageSetTest):
  @parameterized.product(
    save=(np.savez, np.savez_compressed), batch_size=(1, 3, 7, 50)
  )
  def test_reads_batches_in_order(self, save, batch_size):
    save(self.file, _IMAGES, np.arange(7))  # arr_1: labels
    images = open_images(self.file)
    self.assertLen(images, 7)
    self.assertEqual(images.size, (6, 5))
    batches = list(images.batches(batch_size))
    self.assertTrue(all(len(b) == batch_size for b in batches[:-1]))
    np.testing.assert_array_equal(np.concatenate(batches), _IMAGES)

  def test_reads_again_from_the_start(self):
    np.savez(self.file, _IMAGES)
    images = open_images(self.file)
    next(images.batches(2))
    np.testing.assert_array_equal(_read(images), _IMAGES)

  def test_grey_images_become_rgb(self):
    np.savez(self.file, _IMAGES[..., :1])
    expected = _IMAGES[..., :1].repeat(3, -1)
    np.testing.assert_array_equal(_read(open_images(self.file)), expected)

  def test_reads_columns_first(self):
    np.savez(self.file, np.asfortranarray(_IMAGES))
    np.testing.assert_array_equal(_read(open_images(self.file)), _IMAGES)

  @parameterized.named_parameters(
    ("float", _IMAGES.astype(np.float32) / 255, "dtype float32"),
    ("int", _IMAGES.astype(np.int64), "dtype int64"),
    ("objects", np.array([None, 1]), "dtype object"),
    ("nchw", _IMAGES.transpose(0, 3, 1, 2), r"shape \(7, 3, 6, 5\)"),
    ("grey", _IMAGES[..., 0], r"shape \(7, 6, 5\)"),
    ("empty", _IMAGES[:0], "holds no image"),
  )
  def test_other_content_is_refused(self, array, pattern):
    np.savez(self.file, np.array(array))
    self._refused(pattern)

  def test_other_names_are_refused(self):
    np.savez(self.file, images=_IMAGES)
    self._refused("holds .'images',.; images must be arr_0 of dtype uint8")

  def test_missing_file_is_named(self):
    self._refused("no such file", error=FileNotFoundError)

  def test_other_files_are_refused(self):
    self.file.write_bytes(b"text")
    self._refused("not an npz file")

  def test_truncated_file_is_refused(self):
    np.savez(self.file, _IMAGES)
    content = self.file.read_bytes()
    self.file.write_bytes(content[: len(content) // 2])
    self._refused("truncated")

  def test_damaged_pixels_are_noticed(self):
    np.savez(self.file, _IMAGES)
    content = bytearray(self.file.read_bytes())
    content[len(content) // 2] ^= 255
    self.file.write_bytes(bytes(content))
    with self.assertRaisesRegex(ValueError, "damaged npz file: Bad CRC"):
      _read(open_images(self.file))


class FolderTest(ImageSetTest):
  def _save(self, name, image):
    file = self.root / name
    file.parent.mkdir(exist_ok=True)
    Image.fromarray(image).save(file)

  def test_reads_what_the_npz_file_holds(self):
    # In any order, from subfolders and in any lossless format.
    names = ("a/0.png", "a/1.bmp", "a/10.PNG", "b/0.tif", "c.png", "d.webp")
    for name, image in zip(names, _IMAGES):
      if name.endswith("webp"):
        Image.fromarray(image).save(self.root / name, lossless=True)
      else:
        self._save(name, image)
    (self.root / "notes.txt").write_text("not an image")
    self._save(".thumbnails/0.png", _IMAGES[-1])
    np.savez(self.file, _IMAGES[:6])
    images, stored = open_images(self.root), open_images(self.file)
    self.assertLen(images, 6)
    self.assertEqual(images.size, stored.size)
    pixels = _read(images, 4)
    self.assertEqual(_sorted(pixels), _sorted(_read(stored, 5)))
    np.testing.assert_array_equal(pixels, _read(open_images(self.root), 6))

  def test_classes_are_mixed(self):
    for label in range(4):
      for i in range(25):
        pixels = np.full((2, 2, 3), label, np.uint8)
        self._save(f"{label}/{i:03d}.png", pixels)
    labels = _read(open_images(self.root), 7)[:, 0, 0, 0]
    for start in range(0, 100, 20):
      self.assertLen(set(labels[start : start + 20]), 4)

  @parameterized.parameters("jpg", "png", "tif")
  def test_images_that_a_camera_turned_are_upright(self, suffix):
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    for i, pixels in enumerate((_IMAGES[0], _IMAGES[1].transpose(1, 0, 2))):
      options = {"exif": turned} if i else {}
      Image.fromarray(pixels).save(self.root / f"{i}.{suffix}", **options)
    images = open_images(self.root)
    self.assertEqual(images.size, (6, 5))
    self.assertEqual(_read(images).shape, (2, 6, 5, 3))

  def test_grey_images_become_rgb(self):
    self._save("0.png", _IMAGES[0, ..., 0])
    (image,) = _read(open_images(self.root))
    np.testing.assert_array_equal(image, np.stack([_IMAGES[0, ..., 0]] * 3, -1))

  def test_several_sizes_are_refused(self):
    self._save("0.png", _IMAGES[0])
    self._save("1.png", _IMAGES[1, :4])
    self._refused(
      "one size.*0.png has 6 rows x 5 columns.*1.png has 4 rows x 5 columns",
      self.root,
    )

  def test_several_sizes_are_cropped_to_one(self):
    self._save("0.png", _IMAGES[0])
    self._save("1.png", _IMAGES[1, :4])
    images = open_images(self.root, image_size=4)
    self.assertEqual(images.size, (4, 4))
    pixels = _read(images)
    self.assertEqual(pixels.shape, (2, 4, 4, 3))
    # 4 rows x 5 columns need no other size: the centre begins at column 0.
    expected = _IMAGES[1, :4, :4]
    self.assertTrue((pixels == expected).all((1, 2, 3)).any())

  def test_images_below_the_crop_are_refused(self):
    self._save("0.png", _IMAGES[0])
    with self.assertRaisesRegex(ValueError, "0.png has 6 rows.*--image-size 6"):
      open_images(self.root, image_size=6)

  def test_a_folder_without_images_is_refused(self):
    self._refused("no image file", self.root, FileNotFoundError)

  def test_a_file_that_is_no_image_is_refused(self):
    (self.root / "0.png").write_text("text")
    self._refused("not an image", self.root)

  def test_a_truncated_image_is_named_when_read(self):
    self._save("0.png", _IMAGES[0])
    content = (self.root / "0.png").read_bytes()
    (self.root / "0.png").write_bytes(content[:60])
    with self.assertRaisesRegex(ValueError, r"0\.png: damaged"):
      _read(open_images(self.root))


if __name__ == "__main__":
  absltest.main()
