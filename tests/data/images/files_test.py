import pathlib
import struct
import tempfile
import zlib

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data import decode as images

_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


def _write(path, pixels=_RGB, **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path, **options)
  return path


def _png(bits, values, transparent=None, side=1):
  """A PNG file of equal pixels, grey or RGB, of any depth; Pillow has few."""

  def chunk(kind, data):
    body = kind + data
    return (
      struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
    )

  colour = 0 if len(values) == 1 else 2
  header = struct.pack(">IIBBBBB", side, side, bits, colour, 0, 0, 0)
  text = "".join(format(value, f"0{bits}b") for value in values) * side
  size = -(-len(text) // 8)
  row = b"\0" + int(text.ljust(8 * size, "0"), 2).to_bytes(size, "big")
  level = b""
  if transparent is not None:
    level = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
  return (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", header)
    + level
    + chunk(b"IDAT", zlib.compress(row * side, 9))
    + chunk(b"IEND", b"")
  )


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

  @parameterized.parameters("RGBA", "LA", "P")
  def test_transparent_pixels_are_white(self, mode):
    picture = Image.fromarray(np.full((2, 2), 80, np.uint8)).convert(mode)
    if mode == "P":
      picture.info["transparency"] = picture.getpixel((0, 0))
      picture.putpixel((1, 0), (picture.getpixel((0, 0)) + 1) % 256)
      expected = [[True, False], [True, True]]
    else:
      alpha = Image.fromarray(np.array([[0, 255], [0, 0]], np.uint8))
      picture.putalpha(alpha)
      expected = [[True, False], [True, True]]
    path = self.root / "x.png"
    picture.save(path)
    white = (images.read_image(path, 3) == 255).all(-1)
    np.testing.assert_array_equal(white, expected)

  def test_half_transparent_pixels_are_mixed_with_white(self):
    rgba = np.concatenate([_RGB, np.full((6, 5, 1), 51, np.uint8)], -1)
    path = _write(self.root / "x.png", rgba)
    np.testing.assert_allclose(
      images.read_image(path, 3), 0.2 * _RGB + 0.8 * 255, atol=1
    )

  @parameterized.parameters(*range(1, 9))
  def test_orientation_of_the_camera_is_applied(self, orientation):
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8] = 255  # a white corner, upper left
    # What a camera held so stores: the inverse of what EXIF asks for.
    undo = {
      1: lambda x: x,
      2: lambda x: x[:, ::-1],
      3: lambda x: x[::-1, ::-1],
      4: lambda x: x[::-1],
      5: lambda x: x.swapaxes(0, 1),
      6: lambda x: np.rot90(x, 1),
      7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
      8: lambda x: np.rot90(x, -1),
    }
    stored = undo[orientation](upright)
    exif = Image.Exif()
    exif[274] = orientation
    path = self.root / "x.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    np.testing.assert_array_equal(images.read_image(path, 3), upright)

  def test_inks_become_colours(self):
    path = self.root / "x.jpg"
    colours = Image.new("RGB", (8, 8), (200, 30, 90))
    colours.convert("CMYK").save(path, quality=100)
    image = images.read_image(path, 3)
    self.assertEqual(image.shape, (8, 8, 3))
    np.testing.assert_allclose(image - np.array([200, 30, 90]), 0, atol=3)

  @parameterized.parameters("gif", "webp", "png", "tiff")
  def test_of_an_animation_the_first_frame_is_read(self, suffix):
    frames = [Image.new("RGB", (6, 5), c) for c in ("red", "blue", "lime")]
    path = self.root / f"x.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    image = images.read_image(path, 3)
    np.testing.assert_array_equal(image, np.full((5, 6, 3), (255, 0, 0)))

  def test_two_bytes_a_colour_are_read(self):
    content = _png(16, (0x8000, 0x4000, 0xFF00))
    image = images.decode_image(content, 3, "x.png")
    np.testing.assert_array_equal(image, [[[0x80, 0x40, 0xFF]]])

  @parameterized.product(
    depth=(
      (1, (1,), 255),
      (2, (1,), 85),
      (4, (9,), 153),
      (8, (9,), 9),
      (16, (0x1234,), 18),
      (8, (9, 9, 9), 9),
      (16, (0x1234,) * 3, 18),
    ),
    transparent=(None, True, False),
    channels=(1, 3),
  )
  def test_what_is_transparent_is_white_at_any_depth(
    self, depth, transparent, channels
  ):
    bits, values, shown = depth
    other = tuple(value ^ 1 << bits - 1 for value in values)
    level = {None: None, True: values, False: other}[transparent]
    content = _png(bits, values, level)
    image = images.decode_image(content, channels, "x.png")
    expected = 255 if transparent else shown
    np.testing.assert_array_equal(image, np.full((1, 1, channels), expected))

  @parameterized.parameters(2, 4)
  def test_grey_of_few_bits_is_whole(self, bits):
    content = _png(bits, (0,), side=1500)  # short for 8 bits a pixel
    image = images.decode_image(content, 1, "x.png")
    np.testing.assert_array_equal(image, np.zeros((1500, 1500, 1)))

  def test_fractions_are_refused(self):
    path = self.root / "x.tiff"
    Image.fromarray(np.ones((3, 3), np.float32)).save(path)
    with self.assertRaisesRegex(ValueError, "x.tiff: .*floating-point"):
      images.read_image(path, 1)

  def test_broken_link_is_named(self):
    path = self.root / "x.png"
    path.symlink_to(self.root / "gone.png")
    with self.assertRaisesRegex(FileNotFoundError, "x.png: a broken link"):
      images.read_image(path, 3)

  @parameterized.parameters(
    ("L", True), ("1", True), ("LA", True), ("I;16", True), ("RGB", False),
    ("P", False), ("RGBA", False),
  )  # fmt: skip
  def test_header_tells_size_and_grey(self, mode, grey):
    path = self.root / "x.png"
    Image.new(mode, (5, 7)).save(path)
    described = images.describe_image(path.read_bytes(), "x")
    self.assertEqual(described, ((7, 5), grey))

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


if __name__ == "__main__":
  absltest.main()
