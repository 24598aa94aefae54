import dataclasses
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image
from sklearn import datasets

from moh_jax.config import Config, DataConfig, ViTConfig
from moh_jax.data import identity, image_folders, sources

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
    source = image_folders.ImageFolderSource(str(self.root), "train", 3)
    self.assertEqual(source.class_names, ("ant", "cat", "zebra"))
    self.assertEqual([int(source[i]["label"]) for i in range(3)], [0, 1, 2])

  def test_reads_each_classes_own_pixels(self):
    _write(self.root / "val" / "ant" / "1.png", _RGB)
    _write(self.root / "val" / "cat" / "1.png", 255 - _RGB)
    source = image_folders.ImageFolderSource(str(self.root), "val", 3)
    np.testing.assert_array_equal(source[0]["image"], _RGB)
    np.testing.assert_array_equal(source[1]["image"], 255 - _RGB)
    self.assertEqual(source[1]["label"].dtype, np.int32)

  def test_suffixes_decide_what_is_an_image(self):
    _write(self.root / "train" / "ant" / "1.PNG", format="PNG")
    _write(self.root / "train" / "ant" / "2.jpeg")
    (self.root / "train" / "ant" / "notes.txt").write_text("no image")
    (self.root / "train" / "list.csv").write_text("no class")
    source = image_folders.ImageFolderSource(str(self.root), "train", 3)
    self.assertLen(source, 2)
    self.assertEqual(source.class_names, ("ant",))

  def test_missing_directory_is_named(self):
    path = str(self.root / "images")
    with self.assertRaisesRegex(FileNotFoundError, "no such directory") as e:
      image_folders.ImageFolderSource(path, "train", 3)
    self.assertIn(path, str(e.exception))

  @parameterized.parameters((), ("ant", "cat"))
  def test_directory_without_images_is_named(self, *folders):
    (self.root / "train").mkdir()
    for folder in folders:
      (self.root / "train" / folder).mkdir()
    with self.assertRaisesRegex(FileNotFoundError, "holds no image") as e:
      image_folders.ImageFolderSource(str(self.root), "train", 3)
    self.assertIn(str(self.root / "train"), str(e.exception))

  def test_damaged_image_is_named_when_read(self):
    path = _write(self.root / "train" / "ant" / "1.png")
    path.write_bytes(path.read_bytes()[:60])
    source = image_folders.ImageFolderSource(str(self.root), "train", 3)
    with self.assertRaisesRegex(ValueError, "damaged or truncated") as e:
      source[0]
    self.assertIn(str(path), str(e.exception))

  def test_pickles(self):
    _write(self.root / "train" / "ant" / "1.png")
    source = image_folders.ImageFolderSource(str(self.root), "train", 3)
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(copy[0]["image"], _RGB)


class ClassNamesTest(_TempDirTest):
  def _labels(self, *folders, names, split="val"):
    for folder in folders:
      _write(self.root / split / folder / "1.png")
    source = image_folders.ImageFolderSource(
      str(self.root), split, 3, class_names=names
    )
    self.assertEqual(source.class_names[: len(names)], names)
    return {
      source.name(i).partition("/")[0]: int(source[i]["label"])
      for i in range(len(source))
    }

  def test_labels_are_the_models(self):
    labels = self._labels("dog", "ant", names=("dog", "cat", "ant"))
    self.assertEqual(labels, {"dog": 0, "ant": 2})

  def test_class_that_is_missing_is_said(self):
    with self.assertLogs(level="WARNING") as logs:
      self._labels("ant", names=("ant", "bee", "cat"))
    self.assertIn("no folder of 2 classes", logs.output[0])

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

  def test_numbers_that_are_names_stay_names(self):
    labels = self._labels("3", "5", names=("3", "5"))
    self.assertEqual(labels, {"3": 0, "5": 1})


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


class FakeLatentsTest(absltest.TestCase):
  def test_are_ready_to_use(self):
    source = sources.FakeSource("train", 50, _MODEL, latent=True)
    latents = np.stack([source[i]["image"] for i in range(50)])
    self.assertEqual(latents.dtype, np.float32)
    self.assertEqual(latents.shape[1:], (8, 12, 3))
    self.assertAlmostEqual(latents.mean(), 0, delta=0.03)
    self.assertAlmostEqual(latents.std(), 1, delta=0.03)
    np.testing.assert_array_equal(source[3]["image"], latents[3])


def _config(model=_MODEL, **data):
  return Config(model=model, data=DataConfig(**data))


class MakeSourceTest(_TempDirTest):
  def test_unknown_split_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "split='test' .*'train', 'val'"):
      sources.make_source(_config(), "test")

  def test_number_of_classes_must_fit(self):
    config = _config(source="digits")
    with self.assertRaisesRegex(
      ValueError, r"10 classes .*must be model.num_classes=2"
    ):
      sources.make_source(config, "train")

  def test_channels_must_fit(self):
    model = dataclasses.replace(_MODEL, num_classes=10)
    config = _config(model, source="digits")
    with self.assertRaisesRegex(
      ValueError, r"of 1 channels, must be model.channels=3"
    ):
      sources.make_source(config, "train")

  def test_batch_beyond_the_data_is_said(self):
    with self.assertLogs(level="WARNING") as logs:
      sources.make_source(_config(source="fake", fake_examples=7), "train")
    self.assertIn("more than the 7 training examples", logs.output[0])

  @parameterized.parameters("fake", "image_folder")
  def test_opens_the_configured_source(self, name):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.png")
    config = _config(source=name, path=str(self.root), fake_examples=7)
    source = sources.make_source(config, "train")
    self.assertLen(source, 7 if name == "fake" else 2)
    self.assertLen(source.class_names, 2)

  def test_check_names_all_bad_images_at_once(self):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.png")
    (self.root / "train/ant/0.png").write_text("no image")
    (self.root / "train/cat/2.png").symlink_to(self.root / "gone.png")
    config = _config(
      source="image_folder", path=str(self.root), bad_images="check"
    )
    with self.assertRaisesRegex(
      ValueError, "2 of 4 images .*ant/0.png: not .*; .*cat/2.png: a broken l"
    ):
      sources.make_source(config, "train")
    for name in ("ant/0.png", "cat/2.png"):
      (self.root / "train" / name).unlink()
    self.assertLen(sources.make_source(config, "train"), 2)

  @parameterized.parameters("train/ant/0.png", "train/cat/2.png")
  def test_check_names_bad_images_of_both_parts_at_once(self, bad):
    for split in sources.SPLITS:
      for folder in ("ant", "cat"):
        _write(self.root / split / folder / "1.png")
    for name in (bad, "val/cat/5.png"):
      (self.root / name).write_text("no image")
    config = _config(
      source="image_folder", path=str(self.root), bad_images="check"
    )
    with self.assertRaisesRegex(ValueError, f"{bad}: not .*val/cat/5.png: not"):
      sources.make_source(config, "train")

  def test_other_images_of_the_same_names_are_other_data(self):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.bmp")
    config = _config(source="image_folder", path=str(self.root))

    def stream():
      return {"train": sources.make_source(config, "train").identity()}

    before = stream()
    self.assertEqual(stream(), before)
    file = self.root / "train/cat/1.bmp"
    _write(file, 255 - _RGB)  # of the same size
    self.assertRegex(
      " ".join(identity.differences(stream(), before)), "content .* here"
    )
    # Checkpoints of older versions do not know of it.
    del before["train"]["content"]
    self.assertEqual(identity.differences(stream(), before), [])

  @parameterized.parameters(0.25, 0.5)
  def test_identity_holds_the_held_out_share(self, share):
    for folder in ("ant", "cat"):
      for i in range(20):
        _write(self.root / folder / f"{i}.png")
    config = _config(
      source="image_folder", path=str(self.root), val_share=share
    )
    train = sources.make_source(config, "train").identity()
    self.assertEqual(train["val_share"], str(share))
    val = sources.make_source(config, "val", ("ant", "cat")).identity()
    self.assertEqual(train["examples"] + val["examples"], 40)

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

  def test_one_class_is_no_task_for_a_classifier(self):
    _write(self.root / "train" / "ant" / "1.png")
    model = dataclasses.replace(_MODEL, num_classes=1)
    config = _config(model, source="image_folder", path=str(self.root))
    with self.assertRaisesRegex(ValueError, "one class, 'ant'; a classifier"):
      sources.make_source(config, "train")

  def test_centre_crop_needs_large_images(self):
    for folder in ("ant", "cat"):
      _write(self.root / "train" / folder / "1.png")
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

  def test_digits_may_be_enlarged(self):
    model = dataclasses.replace(
      _MODEL, image_size=(16, 16), channels=1, num_classes=10
    )
    data = DataConfig(
      source="digits", augment="center_flip", mean=(0.5,), std=(0.5,)
    )
    source = sources.make_source(Config(model=model, data=data), "train")
    self.assertEqual(source[0]["image"].shape, (8, 8, 1))


if __name__ == "__main__":
  absltest.main()
