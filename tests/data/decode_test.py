"""simplejpeg against Pillow: the same pixels, and the same errors."""

import io
import itertools
import struct
import zlib
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized
from PIL import Image, PngImagePlugin

from moh_jax.data import decode, jpeg, transforms
from tests.data.tiny_images import encode, photo
from tests.folders import FolderTest

# TIFF files by name: the type of their pixels, and tags that are changed.
_TAGS = {
  "32.tiff": (np.int32, {}),
  "12.tiff": (np.uint16, {258: 12}),
  "signed.tiff": (np.int32, {258: 16}),
  "inverted.tiff": (np.uint16, {262: 0}),
}
_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


def _png(bits, values, transparent=None, side=1):
  """A PNG file of equal pixels, grey or RGB, of any depth; Pillow has few."""
  colour = 0 if len(values) == 1 else 2
  text = "".join(format(value, f"0{bits}b") for value in values) * side
  size = -(-len(text) // 8)
  row = b"\0" + int(text.ljust(8 * size, "0"), 2).to_bytes(size, "big")
  level = transparent or ()
  file = io.BytesIO()
  file.write(b"\x89PNG\r\n\x1a\n")
  for kind, data in (
    (b"IHDR", struct.pack(">IIBBBBB", side, side, bits, colour, 0, 0, 0)),
    (b"tRNS", struct.pack(f">{len(level)}H", *level)),
    (b"IDAT", zlib.compress(row * side, 9)),
    (b"IEND", b""),
  ):
    if data or kind == b"IEND":
      PngImagePlugin.putchunk(file, kind, data)
  return file.getvalue()


class ReadImageTest(FolderTest):
  @parameterized.parameters("gif", "webp", "png", "tiff", "bmp")
  def test_the_first_frame_is_read_to_the_pixel(self, suffix):
    frames = [Image.new("RGB", (5, 6), c) for c in ("red", "blue", "lime")]
    path, options = self.root / f"x.{suffix}", {}
    if suffix != "gif":  # of few colours
      frames[0] = Image.fromarray(_RGB)
    if suffix != "bmp":
      options = {"save_all": True, "append_images": frames[1:]}
    if suffix == "webp":
      options["lossless"] = True
    frames[0].save(path, **options)
    expected = np.asarray(frames[0])
    np.testing.assert_array_equal(decode.read_image(path, 3), expected)

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

  @parameterized.product(
    depth=(
      (1, (1,), 255),
      (2, (1,), 85),
      (4, (9,), 153),
      (8, (9,), 9),
      (16, (0x1234,), 18),
      (8, (9, 9, 9), 9),
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
    image = decode.decode_image(content, channels, "x.png")
    expected = 255 if transparent else shown
    np.testing.assert_array_equal(image, np.full((1, 1, channels), expected))

  def test_a_transparent_colour_of_16_bits_is_refused(self):
    image = decode.decode_image(_png(16, (0x1234,) * 3), 3, "x.png")
    np.testing.assert_array_equal(image, np.full((1, 1, 3), 18))
    content = _png(16, (0x1234,) * 3, (0x1233,) * 3)
    with self.assertRaisesRegex(ValueError, "x.png: .*16 bits is transparent"):
      decode.decode_image(content, 3, "x.png")

  @parameterized.parameters(2, 4)
  def test_grey_of_few_bits_is_whole(self, bits):
    content = _png(bits, (0,), side=1500)  # short for 8 bits a pixel
    image = decode.decode_image(content, 1, "x.png")
    np.testing.assert_array_equal(image, np.zeros((1500, 1500, 1)))

  def test_formats_that_run_programs_or_unpack_all_are_not_opened(self):
    fits = b"SIMPLE  = T".ljust(80) + b"END".ljust(2800)
    for content in (encode(Image.new("RGB", (4, 4)), "EPS"), fits):
      with self.assertRaisesRegex(ValueError, "a.png: not an image of a known"):
        decode.decode_image(content, 3, "a.png")
      with self.assertRaisesRegex(ValueError, "a.png: not an image of a known"):
        decode.describe_image(content, "a.png")

  def test_jpeg_with_endless_passes_is_refused(self):
    image = Image.effect_noise((64, 64), 50).convert("RGB")
    content = encode(image, "JPEG", progressive=True)
    scan, end = content.rindex(b"\xff\xda"), len(content) - 2
    many = content[:end] + content[scan:end] * 100 + content[end:]
    self.assertEqual(decode.decode_image(content, 3, "x").shape, (64, 64, 3))
    with self.assertRaisesRegex(ValueError, "x.jpg: .* more than 64 passes"):
      decode.decode_image(many, 3, "x.jpg")

  def test_formats_decoded_by_python_have_fewer_pixels(self):
    side = 4097
    head = struct.pack("<2sIHHI", b"BM", 1 << 20, 0, 0, 1078)
    head += struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 0, 0, 0, 0, 0)
    content = head + bytes(1024) + b"\x00\x00" * side  # rows that are left out
    with self.assertRaisesRegex(ValueError, "x.bmp: .*at most 16,777,216 pix"):
      decode.decode_image(content, 3, "x.bmp")

  @parameterized.product(mode=("P", "RGBA", "LA", "I;16"), channels=(1, 3))
  def test_bands_are_the_whole(self, mode, channels):
    image = photo((37, 23)).convert("RGBA")
    image.putalpha(image.getchannel("G"))
    if mode == "I;16":
      image = Image.fromarray(np.asarray(image).view(np.uint16)[..., 0].copy())
    else:
      image = image.convert(mode)
    whole = decode.to_pixels(image.copy(), channels)
    with mock.patch.object(decode, "_BAND", 64):
      bands = decode.to_pixels(image, channels)
    np.testing.assert_array_equal(whole, bands)

  @parameterized.parameters(
    ("L", True), ("1", True), ("LA", True), ("I;16", True), ("RGB", False),
    ("P", False), ("RGBA", False),
  )  # fmt: skip
  def test_header_tells_size_and_grey(self, mode, grey):
    path = self.root / "x.png"
    Image.new(mode, (5, 7)).save(path)
    described = decode.describe_image(path.read_bytes(), "x")
    self.assertEqual(described, ((7, 5), grey))

  def test_tiles_are_as_large_as_images_may_be(self):
    for side, message in ((16, "damaged"), (44_800, "tiles of 2,007,040,000")):
      tags = (
        *((256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1)),
        *((322, side), (323, side), (324, 200), (325, 8)),
      )
      content = b"II*\0" + struct.pack("<IH", 8, len(tags))
      content += b"".join(struct.pack("<HHII", t, 4, 1, v) for t, v in tags)
      with self.assertRaisesRegex(ValueError, message):
        decode.decode_image(content.ljust(208, b"\0"), 3, "x.tiff")

  @parameterized.parameters(8, 16)
  def test_raw_planes_of_8_bits_are_read_and_of_16_refused(self, bits):
    planes = _RGB.transpose(2, 0, 1).astype("<u2" if bits == 16 else "u1")
    size, where = planes[0].nbytes, 8 + 2 + 12 * 10 + 4
    behind = struct.pack("<3H", *[bits] * 3)
    behind += struct.pack("<3I", *(where + 30 + size * i for i in range(3)))
    behind += struct.pack("<3I", *[size] * 3) + planes.tobytes()
    tags = (
      *((256, 4, 1, 5), (257, 4, 1, 6), (258, 3, 3, where), (259, 4, 1, 1)),
      *((262, 4, 1, 2), (273, 4, 3, where + 6), (277, 4, 1, 3)),
      *((278, 4, 1, 6), (279, 4, 3, where + 18), (284, 4, 1, 2)),
    )
    content = b"II*\0" + struct.pack("<IH", 8, len(tags))
    content += b"".join(struct.pack("<HHII", *tag) for tag in tags)
    content += bytes(4) + behind
    if bits == 8:
      found = decode.decode_image(content, 3, "x.tiff")
      np.testing.assert_array_equal(found, _RGB)
      return
    with self.assertRaisesRegex(ValueError, "x.tiff: .*planes of 16 bits"):
      decode.decode_image(content, 3, "x.tiff")

  @parameterized.parameters(
    *((f"half.{kind}", 3, "") for kind in ("png", "jpg", "bmp", "gif", "webp")),
    ("fractions.tiff", 1, ".*floating-point"),
    ("32.tiff", 3, ".*numbers with a sign, must be of 8"),
    ("12.tiff", 1, ".*of 12 bits"),
    ("signed.tiff", 1, ".*with a sign"),
    ("inverted.tiff", 3, ".*of which 0 is white"),
    ("whole.png", 4, ".*1 or 3 channels.* has 4"),
    ("nope.png", 3, "no such image file"),
    (".", 3, "no such image file"),
    ("link.png", 3, "a broken link"),
  )
  def test_what_cannot_be_read_is_named(self, name, channels, message):
    path = self.root / name
    if name.startswith("fractions"):
      Image.fromarray(np.ones((3, 3), np.float32)).save(path)
    elif name in _TAGS:
      kind, tags = _TAGS[name]
      Image.fromarray(np.ones((4, 4), kind)).save(path)
      content = bytearray(path.read_bytes())
      for tag, value in tags.items():
        entry = struct.pack("<HHI", tag, 3, 1)
        content[content.index(entry) + len(entry)] = value
      path.write_bytes(content)
    elif name.startswith(("half", "whole")):
      Image.fromarray(_RGB).save(path)
    if name.startswith("half"):
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (self.root / "link.png").symlink_to(self.root / "gone.png")
    with self.assertRaisesRegex(
      (ValueError, FileNotFoundError), f"^{path}: {message}"
    ):
      decode.read_image(path, channels)


pytest.importorskip("simplejpeg")


def by_pillow(*args):
  with mock.patch.object(jpeg, "_simplejpeg", lambda: None):
    return decode.decode_image(*args)


class DecodersTest(parameterized.TestCase):
  @parameterized.product(
    mode=("RGB", "L"),
    channels=(1, 3),
    factor=(1, 2, 4, 8),
    options=(
      {"subsampling": 0},
      {"subsampling": 1},
      {"subsampling": 2},
      {"subsampling": 2, "restart_marker_blocks": 3},
      {"progressive": True},
    ),
  )
  def test_pixels_are_equal_at_every_scale_and_down_to_any_row(
    self, mode, channels, factor, options
  ):
    content = encode(photo(mode=mode), quality=92, **options)
    whole = decode.decode_image(content, channels, "x", factor)
    expected = by_pillow(content, channels, "x", factor)
    np.testing.assert_array_equal(whole, expected)
    shape = (-(-167 // factor), -(-251 // factor), channels)
    self.assertEqual(whole.shape, shape)
    used = jpeg.decode(content, channels, factor) is not None
    self.assertEqual(used, mode == "L" or channels == 3)
    for rows in (1, 15, 16, 17, 63, 64, 100, 160, 166, 167, 500):
      ours = decode.decode_image(content, channels, "x", factor, rows)
      np.testing.assert_array_equal(ours, whole[: len(ours)])
      self.assertGreaterEqual(len(ours), min(-(-rows // factor), len(whole)))
      if rows <= 100:
        fewer = used and "progressive" not in options
        self.assertEqual(len(ours) < len(whole), fewer)

  @parameterized.parameters(*range(1, 9))
  def test_turned_images_are_left_to_pillow(self, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    content = encode(photo(), exif=exif)
    self.assertIsNone(jpeg.decode(content, 3))
    pixels = decode.decode_image(content, 3, "x")
    self.assertEqual(decode.describe_image(content, "x")[0], pixels.shape[:2])
    for factor in (2, 8):
      smaller = decode.decode_image(content, 3, "x", factor).shape[:2]
      self.assertEqual(
        smaller, tuple(-(-side // factor) for side in pixels.shape[:2])
      )

  def test_damage_gives_the_same_error_or_the_same_pixels(self):
    whole = encode(photo())
    rng = np.random.default_rng(0)
    lengths = (3, 30, 400, 2000, len(whole) * 3 // 4, len(whole) - 2)
    cut = [whole[:length] for length in lengths]
    altered = []
    for _ in range(40):
      content = bytearray(whole)
      content[rng.integers(len(whole))] = rng.integers(256)
      altered.append(bytes(content))
    cases = itertools.product([*cut, *altered], (1, 4), (None, 20))
    for content, factor, rows in cases:
      results = []
      for read in (decode.decode_image, by_pillow):
        try:
          pixels = read(content, 3, "x.jpg", factor, rows)
          results.append(pixels[: rows and -(-rows // factor)])
        except ValueError as error:
          results.append(str(error))
      self.assertIsInstance(results[0], type(results[1]))
      np.testing.assert_array_equal(*results)


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
  return np.asarray(
    picture.crop((left, top, left + wanted[0], top + wanted[1]))
  )


class EvaluationTest(parameterized.TestCase):
  @parameterized.product(
    name=("china", "flower"),
    size=((500, 375), (375, 500), (333, 500), (640, 427), (301, 299)),
    resize=(
      *((256, (224, 224)), (232, (224, 224)), (438, (384, 384))),
      *((96, (96, 192)), (96, (192, 96)), (256, (224, 320))),
    ),
    fast=(False, True),
  )
  def test_equals_torchvision_on_photographs(self, name, size, resize, fast):
    if fast:
      pytest.importorskip("cykooz_resizer")
    picture = photo(size, name=name)
    expected = _torchvision(picture, *resize)
    crop = transforms.ResizeCenterCrop(*resize, fast)
    ours = crop.map({"image": np.asarray(picture)})["image"]
    difference = np.abs(ours.astype(int) - expected)
    # Pillow rounds between its two passes, whose order depends on the box.
    self.assertLessEqual(difference.mean(), 0.25)
    self.assertLessEqual(difference.max(), 12)


def _later(size, **options):
  content = encode(photo(size), quality=95, **options)
  return decode.decode_later(content, 3, "x.jpg")


class LaterTest(parameterized.TestCase):
  @parameterized.product(
    box=((0, 0, 300, 70), (40.5, 30.25, 190, 100), (290, 180, 300, 199)),
    size=((64, 64), (200, 300), (20, 30)),
    fast=(False, True),
    subsampling=(0, 2),
  )
  def test_crop_is_that_of_all_pixels(self, box, size, fast, subsampling):
    if fast:
      pytest.importorskip("cykooz_resizer")
    later = _later((300, 200), subsampling=subsampling)
    whole = decode.decode_image(later.content, 3, "x", fast=fast)
    np.testing.assert_array_equal(
      decode.resize(later, size, box, fast=fast),
      decode.resize(whole, size, box, fast=fast),
    )

  @parameterized.parameters(
    transforms.CenterCrop((32, 40)), transforms.CenterCrop((130, 130)),
    transforms.CenterCrop((200, 300)), transforms.Resize((30, 20)),
    transforms.Resize((200, 300)),
  )  # fmt: skip
  def test_whole_images_are_as_decoded_before(self, fit):
    later = _later((300, 200))
    whole = decode.decode_image(later.content, 3, "x")
    np.testing.assert_array_equal(
      fit.map({"image": later})["image"], fit.map({"image": whole})["image"]
    )

  def test_rows_below_the_crop_are_not_decoded(self):
    pytest.importorskip("simplejpeg")
    pixels, _ = _later((300, 200)).region((50, 50), (0, 0, 60, 60))
    self.assertBetween(len(pixels), 62, 80)

  @parameterized.parameters(
    ((0, 0, 800, 600), 32, 8),
    ((0, 0, 800, 600), 50, 4),
    ((0, 0, 800, 600), 100, 2),
    ((0, 0, 800, 600), 160, 1),
    ((10, 20, 410, 270), 32, 2),
    ((10, 20, 74, 84), 32, 1),
  )
  def test_scale_follows_from_the_crop(self, box, side, factor):
    later = _later((800, 600))
    pixels, inside = later.region((side, side), box, reduced=True)
    self.assertEqual(pixels.shape[1], 800 // factor)
    self.assertBetween(pixels.shape[0], box[3] / factor, 600 // factor)
    self.assertEqual(inside, tuple(edge / factor for edge in box))
    self.assertEqual(later.region((side, side), box)[0].shape[1], 800)
