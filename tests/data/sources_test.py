import dataclasses
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image
from sklearn import datasets

from moh_jax.config import DataConfig, ViTConfig
from moh_jax.data import sources

_MODEL = ViTConfig(
  image_size=(8, 12),
  channels=3,
  num_classes=2,
  patch_stride=4,
  embed_dims=(8,),
  depths=(1,),
  num_heads=(2,),
  shared_heads=(1,),
  top_k=(1,),
  mlp_ratios=(2,),
  sr_ratios=(1,),
)
_RGB = np.random.RandomState(0).randint(0, 256, (6, 5, 3), np.uint8)


def _write(path, pixels=_RGB, **options):
  path.parent.mkdir(parents=True, exist_ok=True)
  Image.fromarray(pixels).save(path, **options)
  return path


class _TempDirTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))


class DigitsSourceTest(parameterized.TestCase):
  def test_splits_are_a_fifth_and_the_rest(self):
    self.assertLen(sources.DigitsSource("val"), 359)
    self.assertLen(sources.DigitsSource("train"), 1438)

  def test_splits_hold_every_scan_once(self):
    ours = []
    for split in sources.SPLITS:
      source = sources.DigitsSource(split)
      for i in range(len(source)):
        element = source[i]
        row = (*element["image"].ravel().tolist(), int(element["label"]))
        ours.append(row)
    digits = datasets.load_digits()
    pixels = np.round(digits.images.reshape(-1, 64) * 255 / 16).astype(int)
    theirs = [(*x, y) for x, y in zip(pixels.tolist(), digits.target.tolist())]
    self.assertCountEqual(ours, theirs)

  @parameterized.parameters(
    ("train", [8, 6, 5, 3, 4, 4, 4, 8, 8, 7]),
    ("val", [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]),
  )
  def test_split_is_the_same_in_every_run(self, split, labels):
    source = sources.DigitsSource(split)
    self.assertEqual([int(source[i]["label"]) for i in range(10)], labels)

  @parameterized.parameters(*sources.SPLITS)
  def test_pixels_are_bytes_of_full_range(self, split):
    source = sources.DigitsSource(split)
    images = np.stack([source[i]["image"] for i in range(len(source))])
    self.assertEqual(images.dtype, np.uint8)
    self.assertEqual(images.shape[1:], (8, 8, 1))
    self.assertEqual((images.min(), images.max()), (0, 255))

  def test_names_are_the_digits(self):
    source = sources.DigitsSource("val")
    self.assertEqual(source.class_names, tuple("0123456789"))
    self.assertEqual(source.channels, 1)


class ImageFolderSourceTest(_TempDirTest):
  def test_classes_are_sorted_folders(self):
    for name in ("zebra", "ant", "cat"):
      _write(self.root / "train" / name / "1.png")
    source = sources.ImageFolderSource(str(self.root), "train", 3)
    self.assertEqual(source.class_names, ("ant", "cat", "zebra"))
    self.assertEqual([int(source[i]["label"]) for i in range(3)], [0, 1, 2])

  def test_reads_each_classes_own_pixels(self):
    _write(self.root / "val" / "ant" / "1.png", _RGB)
    _write(self.root / "val" / "cat" / "1.png", 255 - _RGB)
    source = sources.ImageFolderSource(str(self.root), "val", 3)
    np.testing.assert_array_equal(source[0]["image"], _RGB)
    np.testing.assert_array_equal(source[1]["image"], 255 - _RGB)
    self.assertEqual(source[1]["label"].dtype, np.int32)

  def test_suffixes_decide_what_is_an_image(self):
    _write(self.root / "train" / "ant" / "1.PNG", format="PNG")
    _write(self.root / "train" / "ant" / "2.jpeg")
    (self.root / "train" / "ant" / "notes.txt").write_text("no image")
    (self.root / "train" / "list.csv").write_text("no class")
    source = sources.ImageFolderSource(str(self.root), "train", 3)
    self.assertLen(source, 2)
    self.assertEqual(source.class_names, ("ant",))

  def test_missing_directory_is_named(self):
    path = str(self.root / "images")
    with self.assertRaisesRegex(FileNotFoundError, "data.path=.*'train'") as e:
      sources.ImageFolderSource(path, "train", 3)
    self.assertIn(path, str(e.exception))

  @parameterized.parameters((), ("ant", "cat"))
  def test_directory_without_images_is_named(self, *folders):
    (self.root / "train").mkdir()
    for folder in folders:
      (self.root / "train" / folder).mkdir()
    with self.assertRaisesRegex(FileNotFoundError, "holds no image") as e:
      sources.ImageFolderSource(str(self.root), "train", 3)
    self.assertIn(str(self.root / "train"), str(e.exception))

  def test_damaged_image_is_named_when_read(self):
    path = _write(self.root / "train" / "ant" / "1.png")
    path.write_bytes(path.read_bytes()[:60])
    source = sources.ImageFolderSource(str(self.root), "train", 3)
    with self.assertRaisesRegex(ValueError, "damaged or truncated") as e:
      source[0]
    self.assertIn(str(path), str(e.exception))

  def test_pickles(self):
    _write(self.root / "train" / "ant" / "1.png")
    source = sources.ImageFolderSource(str(self.root), "train", 3)
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(copy[0]["image"], _RGB)


class FakeSourceTest(absltest.TestCase):
  def test_example_is_a_function_of_the_index(self):
    first = sources.FakeSource("train", 5, _MODEL)[3]
    again = sources.FakeSource("train", 9, _MODEL)[3]
    np.testing.assert_array_equal(first["image"], again["image"])
    self.assertEqual(first["label"], again["label"])

  def test_examples_and_splits_differ(self):
    train = sources.FakeSource("train", 5, _MODEL)
    val = sources.FakeSource("val", 5, _MODEL)
    self.assertFalse((train[0]["image"] == train[1]["image"]).all())
    self.assertFalse((train[0]["image"] == val[0]["image"]).all())

  def test_fits_the_model(self):
    source = sources.FakeSource("val", 40, _MODEL)
    self.assertLen(source, 40)
    self.assertEqual(source[0]["image"].shape, (8, 12, 3))
    self.assertEqual(source[0]["image"].dtype, np.uint8)
    labels = {int(source[i]["label"]) for i in range(40)}
    self.assertEqual(labels, {0, 1})


class MakeSourceTest(_TempDirTest):
  def test_unknown_split_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "split='test' .*'train', 'val'"):
      sources.make_source(DataConfig(), _MODEL, "test")

  def test_number_of_classes_must_fit(self):
    data = DataConfig(source="digits")
    with self.assertRaisesRegex(ValueError, r"num_classes=2 must be the 10"):
      sources.make_source(data, _MODEL, "train")

  def test_channels_must_fit(self):
    data = DataConfig(source="digits")
    model = dataclasses.replace(_MODEL, num_classes=10)
    with self.assertRaisesRegex(ValueError, r"channels=3 must be the 1 "):
      sources.make_source(data, model, "train")

  def test_wrong_number_of_folders_is_refused(self):
    _write(self.root / "train" / "ant" / "1.png")
    data = DataConfig(source="image_folder", path=str(self.root))
    with self.assertRaisesRegex(ValueError, "num_classes=2 must be the 1 "):
      sources.make_source(data, _MODEL, "train")

  @parameterized.parameters(
    ("fake", sources.FakeSource), ("image_folder", sources.ImageFolderSource)
  )
  def test_opens_the_configured_source(self, name, cls):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.png")
    data = DataConfig(source=name, path=str(self.root), fake_examples=7)
    source = sources.make_source(data, _MODEL, "train")
    self.assertIsInstance(source, cls)
    self.assertLen(source.class_names, 2)


class ReadImageTest(_TempDirTest):
  @parameterized.parameters("png", "bmp", "tiff", "webp")
  def test_lossless_formats_keep_every_pixel(self, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    path = _write(self.root / f"x.{suffix}", **options)
    np.testing.assert_array_equal(sources.read_image(path, 3), _RGB)

  def test_jpeg_keeps_size_and_mean(self):
    path = _write(self.root / "x.jpg", np.full((9, 7, 3), 100, np.uint8))
    image = sources.read_image(path, 3)
    self.assertEqual(image.shape, (9, 7, 3))
    np.testing.assert_allclose(image, 100, atol=2)

  def test_grey_becomes_three_equal_channels(self):
    path = _write(self.root / "x.png", _RGB[..., 0])
    image = sources.read_image(path, 3)
    for channel in range(3):
      np.testing.assert_array_equal(image[..., channel], _RGB[..., 0])

  def test_rgb_becomes_luma(self):
    path = _write(self.root / "x.png")
    image = sources.read_image(path, 1)
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
    np.testing.assert_array_equal(sources.read_image(path, 3), colours[index])

  def test_palette_with_transparency_is_read_quietly(self):
    path = self.root / "x.png"
    picture = Image.fromarray(_RGB[..., 0]).convert("P")
    picture.save(path, transparency=bytes([0, 128, 255]))
    self.assertEqual(sources.read_image(path, 3).shape, (6, 5, 3))

  def test_alpha_is_dropped(self):
    rgba = np.concatenate([_RGB, np.full((6, 5, 1), 7, np.uint8)], -1)
    path = _write(self.root / "x.png", rgba)
    np.testing.assert_array_equal(sources.read_image(path, 3), _RGB)

  def test_two_bytes_a_pixel_are_scaled_to_one(self):
    deep = np.array([[0, 0x4080], [0x80FF, 0xFFFF]], np.uint16)
    path = _write(self.root / "x.png", deep)
    image = sources.read_image(path, 1)[..., 0]
    np.testing.assert_allclose(image, deep / 257, atol=1)

  def test_result_has_rows_first(self):
    path = _write(self.root / "x.png", np.zeros((4, 16, 3), np.uint8))
    self.assertEqual(sources.read_image(path, 3).shape, (4, 16, 3))

  def test_truncated_tiff_gives_one_error_and_no_warning(self):
    path = _write(self.root / "x.tiff")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with self.assertRaises(ValueError) as caught:
      sources.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters("png", "jpg", "bmp", "gif", "webp")
  def test_truncated_file_is_named(self, suffix):
    path = _write(self.root / f"x.{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with self.assertRaises(ValueError) as caught:
      sources.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters(b"", b"some text\n", b"\x89PNG\r\n\x1a\n")
  def test_file_that_is_no_image_is_named(self, content):
    path = self.root / "x.png"
    path.write_bytes(content)
    with self.assertRaises(ValueError) as caught:
      sources.read_image(path, 3)
    self.assertStartsWith(str(caught.exception), f"{path}: ")

  @parameterized.parameters("nope.png", ".")
  def test_missing_file_is_named(self, name):
    path = self.root / name
    with self.assertRaisesRegex(FileNotFoundError, "no such image file") as e:
      sources.read_image(path, 3)
    self.assertIn(str(path), str(e.exception))

  def test_other_channels_are_refused(self):
    with self.assertRaisesRegex(ValueError, "1 or 3 channels.* has 4"):
      sources.read_image(_write(self.root / "x.png"), 4)


if __name__ == "__main__":
  absltest.main()
