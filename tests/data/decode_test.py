"""Image files become pixels: Pillow and simplejpeg, whole images and crops."""

from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized
from PIL import Image

from moh_jax.data import decode, transforms
from tests.data.tiny_images import encode, photo
from tests.folders import FolderTest

_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


class ReadImageTest(FolderTest):
  @parameterized.parameters("gif", "webp", "png", "tiff", "bmp")
  def test_the_first_frame_is_read_to_the_pixel(self, suffix):
    path, options = self.root / f"x.{suffix}", {}
    first, *others = (Image.new("RGB", (5, 6), c) for c in ("red", "blue"))
    if suffix != "gif":  # of few colours
      first = Image.fromarray(_RGB)
    if suffix != "bmp":
      options = {"save_all": True, "append_images": others}
    first.save(path, **options, lossless=True)  # WebP would lose some
    found = decode.read_image(path, 3)
    np.testing.assert_array_equal(found, np.asarray(first))

  @parameterized.parameters("RGBA", "LA", "P")
  def test_transparent_pixels_are_white(self, mode):
    picture = Image.fromarray(np.full((2, 2), 80, np.uint8)).convert(mode)
    if mode == "P":
      picture.info["transparency"] = picture.getpixel((0, 0))
      picture.putpixel((1, 0), (picture.getpixel((0, 0)) + 1) % 256)
    else:
      alpha = np.array([[0, 255], [0, 0]], np.uint8)
      picture.putalpha(Image.fromarray(alpha))
    path = self.root / "x.png"
    picture.save(path)
    white = (decode.read_image(path, 3) == 255).all(-1)
    np.testing.assert_array_equal(white, [[True, False], [True, True]])

  @parameterized.parameters(
    (2, lambda x: np.flip(x, 1)),
    (6, lambda x: np.rot90(x, 1)),
    (7, lambda x: np.flip(x, (0, 1)).swapaxes(0, 1)),
  )
  def test_orientation_of_the_camera_is_applied(self, orientation, store):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255  # a white corner, upper left
    exif = Image.Exif()
    exif[274] = orientation
    path = self.root / "x.png"
    stored = Image.fromarray(np.ascontiguousarray(store(upright)))
    stored.save(path, exif=exif)
    np.testing.assert_array_equal(decode.read_image(path, 3), upright)

  @parameterized.parameters(
    ("L", 80, 80), ("I;16", 0x1234, 18), ("CMYK", (0, 0, 0, 55), 200)
  )
  def test_all_modes_become_8_bits(self, mode, value, shown):
    path = self.root / "x.tiff"
    Image.new(mode, (5, 7), value).save(path)
    for channels in (1, 3):
      found = decode.read_image(path, channels)
      np.testing.assert_array_equal(found, np.full((7, 5, channels), shown))

  def test_pixels_of_no_known_range_are_refused(self):
    path = self.root / "x.tiff"
    Image.new("F", (5, 7), 0.5).save(path)
    with self.assertRaisesRegex(ValueError, "floating-point numbers"):
      decode.read_image(path, 1)

  @parameterized.parameters(
    ("L", True), ("1", True), ("LA", True), ("I;16", True), ("RGB", False),
    ("P", False), ("RGBA", False),
  )  # fmt: skip
  def test_header_tells_size_and_grey(self, mode, grey):
    path = self.root / "x.png"
    Image.new(mode, (5, 7)).save(path)
    described = decode.describe_image(path.read_bytes(), "x")
    self.assertEqual(described, ((7, 5), grey))

  @parameterized.parameters("PNG", "JPEG", "BMP", "WEBP")
  def test_what_cannot_be_read_is_named(self, kind):
    content = encode(Image.fromarray(_RGB), kind)
    for damaged in (content[: len(content) // 2], b"some text"):
      with self.assertRaisesRegex(ValueError, "^x: "):
        decode.decode_image(damaged, 3, "x")
    with self.assertRaisesRegex(FileNotFoundError, "nope.png"):
      decode.read_image(self.root / "nope.png", 3)


pytest.importorskip("simplejpeg")


def by_pillow(*args):
  with mock.patch.object(decode, "simplejpeg", None):
    return decode.decode_image(*args)


class DecodersTest(parameterized.TestCase):
  @parameterized.product(
    mode=("RGB", "L"),
    channels=(1, 3),
    options=(
      {"subsampling": 0},
      {"subsampling": 2, "restart_marker_blocks": 3},
      {"progressive": True},
    ),
  )
  def test_pixels_are_equal(self, mode, channels, options):
    content = encode(photo(mode=mode), quality=92, **options)
    found = decode.decode_image(content, channels, "x")
    np.testing.assert_array_equal(found, by_pillow(content, channels, "x"))
    self.assertEqual(found.shape, (167, 251, channels))

  @parameterized.parameters(1, 3, 6, 8)
  def test_turned_photographs_are_upright(self, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    content = encode(photo(), exif=exif)
    pixels = decode.decode_image(content, 3, "x")
    np.testing.assert_array_equal(pixels, by_pillow(content, 3, "x"))
    self.assertEqual(pixels.shape[0] > pixels.shape[1], orientation > 4)
    self.assertEqual(decode.describe_image(content, "x")[0], pixels.shape[:2])


def _torchvision(picture, shorter, crop):
  """`Resize` and `CenterCrop` of torchvision 0.28 on a picture of Pillow.

  Sizes and offsets are computed as its functional_pil and functional do; the
  shorter side is as long as the crop needs.
  """
  wanted, short = crop[::-1], min(picture.size)
  needed = (n * short / side for n, side in zip(wanted, picture.size))
  shorter = max(shorter, *needed)
  scaled = [int(shorter * side / short) for side in picture.size]
  size = [max(sides) for sides in zip(scaled, wanted)]
  picture = picture.resize(size, Image.Resampling.BICUBIC)
  left, top = (round((n - w) / 2.0) for n, w in zip(size, wanted))
  box = (left, top, left + wanted[0], top + wanted[1])
  return np.asarray(picture.crop(box))


class EvaluationTest(parameterized.TestCase):
  @parameterized.product(
    size=((500, 375), (333, 500), (301, 299)),
    resize=((256, (224, 224)), (438, (384, 384)), (96, (96, 192))),
  )
  def test_equals_torchvision_on_photographs(self, size, resize):
    picture = photo(size)
    expected = _torchvision(picture, *resize)
    ours = transforms.resize_center_crop(np.asarray(picture), *resize)
    difference = np.abs(ours.astype(int) - expected)
    # Pillow rounds between its two passes, whose order depends on the box.
    self.assertLessEqual(difference.mean(), 0.25)
    self.assertLessEqual(difference.max(), 12)
