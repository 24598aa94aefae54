import pickle

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.config import DataConfig, ViTConfig
from moh_jax.config.data import RandAugmentPolicy
from moh_jax.data.images import augment, transforms

_MODEL = ViTConfig(
  image_size=(8, 8),
  patch_stride=4,
  embed_dims=(8,),
  depths=(1,),
  num_heads=(2,),
  shared_heads=(1,),
  top_k=(1,),
  mlp_ratios=(2,),
  sr_ratios=(1,),
)
_ALL = (
  transforms.Resize((8, 6)),
  transforms.ResizeCenterCrop(10, (8, 6)),
  transforms.RandomShift(),
  transforms.RandomCropFlip((8, 6)),
  transforms.CenterCrop((8, 6)),
  transforms.RandomFlip(),
  transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
)


def _image(shape, seed=0):
  return np.random.RandomState(seed).randint(0, 256, shape, np.uint8)


def _apply(transform, image, seed=0):
  element = {"image": image, "label": np.int32(3)}
  if hasattr(transform, "random_map"):
    return transform.random_map(element, np.random.default_rng(seed))
  return transform.map(element)


class CommonTest(parameterized.TestCase):
  @parameterized.parameters(*_ALL)
  def test_pickles(self, transform):
    copy = pickle.loads(pickle.dumps(transform))
    self.assertEqual(copy, transform)
    image = _image((11, 9, 3))
    np.testing.assert_array_equal(
      _apply(copy, image)["image"], _apply(transform, image)["image"]
    )

  @parameterized.parameters(*_ALL)
  def test_keeps_the_label_and_its_input(self, transform):
    image = _image((11, 9, 3))
    before = image.copy()
    self.assertEqual(_apply(transform, image)["label"], 3)
    np.testing.assert_array_equal(image, before)

  @parameterized.product(transform=_ALL[:-1], channels=(1, 3))
  def test_pixels_stay_bytes(self, transform, channels):
    out = _apply(transform, _image((11, 9, channels)))["image"]
    self.assertEqual(out.dtype, np.uint8)
    self.assertEqual(out.shape[-1], channels)

  @parameterized.parameters(
    transforms.RandomShift(), transforms.RandomCropFlip((8, 6))
  )
  def test_random_ones_follow_the_generator(self, transform):
    image = _image((16, 16, 3))
    outs = [_apply(transform, image, seed)["image"] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(outs[0], outs[1])
    self.assertFalse(np.array_equal(outs[0], outs[2]))


class ResizeTest(parameterized.TestCase):
  @parameterized.parameters(((5, 9),), ((20, 3),), ((8, 6),))
  def test_gives_rows_and_columns(self, shape):
    out = _apply(transforms.Resize((8, 6)), _image((*shape, 3)))
    self.assertEqual(out["image"].shape, (8, 6, 3))

  @parameterized.parameters(1, 3)
  def test_is_the_identity_at_its_own_size(self, channels):
    image = _image((8, 6, channels))
    out = _apply(transforms.Resize((8, 6)), image)["image"]
    np.testing.assert_array_equal(out, image)

  @parameterized.parameters(1, 3)
  def test_keeps_a_constant(self, channels):
    image = np.full((5, 11, channels), 77, np.uint8)
    out = _apply(transforms.Resize((8, 6)), image)["image"]
    np.testing.assert_array_equal(out, np.full((8, 6, channels), 77))

  def test_averages_when_it_shrinks(self):
    stripes = np.zeros((16, 16, 1), np.uint8)
    stripes[:, ::2] = 200
    out = _apply(transforms.Resize((4, 4)), stripes)["image"]
    np.testing.assert_allclose(out, 100, atol=12)

  def test_rows_stay_rows(self):
    ramp = np.repeat(np.arange(0, 160, 10, dtype=np.uint8), 8)
    out = _apply(transforms.Resize((4, 4)), ramp.reshape(16, 8, 1))["image"]
    self.assertTrue((np.diff(out[..., 0].astype(int), axis=0) > 0).all())
    self.assertTrue((np.diff(out[..., 0].astype(int), axis=1) == 0).all())


class ResizeCenterCropTest(parameterized.TestCase):
  @parameterized.parameters((7, 31), (31, 7), (9, 9), (3, 5), (101, 13))
  def test_size_whatever_the_aspect(self, rows, columns):
    crop = transforms.ResizeCenterCrop(9, (8, 8))
    out = _apply(crop, _image((rows, columns, 3)))["image"]
    self.assertEqual(out.shape, (8, 8, 3))

  def test_takes_the_centre(self):
    image = _image((8, 14, 3))
    out = _apply(transforms.ResizeCenterCrop(8, (6, 6)), image)["image"]
    np.testing.assert_array_equal(out, image[1:7, 4:10])

  def test_resizes_the_shorter_side_first(self):
    image = _image((16, 24, 3))
    out = _apply(transforms.ResizeCenterCrop(8, (8, 8)), image)["image"]
    scaled = transforms.resize(image, (8, 12))
    np.testing.assert_array_equal(out, scaled[:, 2:10])

  @parameterized.parameters(
    ((8, 16), (8, 16)), ((16, 32), (8, 16)), ((16, 16), (8, 16)),
    ((32, 16), (16, 8)), ((9, 30), (8, 16)), ((10, 10), (20, 20)),
  )  # fmt: skip
  def test_other_aspects_lose_no_more_than_they_must(self, shape, size):
    rows, columns = np.indices(shape)
    ramps = np.stack([rows, columns, rows], -1).astype(np.uint8) * 7
    crop = transforms.ResizeCenterCrop(min(size), size)
    out = _apply(crop, ramps)["image"]
    scale = max(np.array(size) / shape)
    whole = transforms.resize(
      ramps, tuple(max(int(n * scale), w) for n, w in zip(shape, size))
    )
    top, left = (
      round((n - w) / 2) for n, w in zip(whole.shape[:2], size, strict=True)
    )
    expected = whole[top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(out, expected.astype(int), atol=3)

  def test_crop_larger_than_the_shorter_side_still_fits(self):
    crop = transforms.ResizeCenterCrop(4, (8, 6))
    self.assertEqual(_apply(crop, _image((5, 9, 1)))["image"].shape, (8, 6, 1))


def _adm(image, size):
  """ADM's rule in Pillow's own terms: widths first."""
  picture = Image.fromarray(image)
  while min(picture.size) >= 2 * size:
    picture = picture.resize(
      (picture.width // 2, picture.height // 2), Image.Resampling.BOX
    )
  scale = size / min(picture.size)
  picture = picture.resize(
    (round(picture.width * scale), round(picture.height * scale)),
    Image.Resampling.BICUBIC,
  )
  left, top = (picture.width - size) // 2, (picture.height - size) // 2
  return np.asarray(picture)[top : top + size, left : left + size]


class CenterCropTest(parameterized.TestCase):
  def test_twice_the_size_is_the_mean_of_four(self):
    image = np.arange(16, dtype=np.uint8).reshape(4, 4, 1) * 4
    out = transforms.center_crop(image, (2, 2))[..., 0]
    np.testing.assert_array_equal(out, [[10, 18], [42, 50]])

  def test_four_times_the_size_is_halved_twice(self):
    image = _image((8, 8, 1)) // 16 * 16
    means = image.reshape(2, 4, 2, 4).mean((1, 3))
    out = transforms.center_crop(image, (2, 2))[..., 0]
    np.testing.assert_allclose(out, means, atol=1)

  @parameterized.parameters(
    ((3, 7), slice(0, 3), slice(2, 5)),
    ((3, 6), slice(0, 3), slice(1, 4)),
    ((8, 3), slice(2, 5), slice(0, 3)),
    ((3, 3), slice(0, 3), slice(0, 3)),
  )
  def test_fitting_shorter_side_is_cropped_alone(self, shape, rows, columns):
    image = _image((*shape, 3))
    out = transforms.center_crop(image, (3, 3))
    np.testing.assert_array_equal(out, image[rows, columns])

  @parameterized.product(
    shape=((8, 8), (9, 17), (31, 16), (64, 50), (33, 130), (5, 6)),
    size=(7, 8),
  )
  def test_equals_the_public_rule(self, shape, size):
    image = _image((*shape, 3))
    out = transforms.center_crop(image, (size, size))
    np.testing.assert_array_equal(out, _adm(image, size))

  @parameterized.parameters((50, 20), (20, 50), (12, 8), (9, 40))
  def test_other_aspects(self, rows, columns):
    image = np.full((rows, columns, 3), 9, np.uint8)
    out = transforms.center_crop(image, (12, 8))
    np.testing.assert_array_equal(out, np.full((12, 8, 3), 9))


class RandomFlipTest(absltest.TestCase):
  def test_half_are_mirrored_left_to_right(self):
    image = _image((4, 6, 3))
    outs = [
      _apply(transforms.RandomFlip(), image, seed)["image"]
      for seed in range(400)
    ]
    mirrored = [np.array_equal(out, image[:, ::-1]) for out in outs]
    for out, mirror in zip(outs, mirrored):
      np.testing.assert_array_equal(out, image[:, ::-1] if mirror else image)
    self.assertBetween(np.mean(mirrored), 0.43, 0.57)


class RandomShiftTest(absltest.TestCase):
  def test_result_is_the_image_moved_by_at_most_an_eighth(self):
    image = _image((16, 8, 1)) // 2 + 1  # no zero, so that padding shows
    padded = np.pad(image, ((2, 2), (1, 1), (0, 0)))
    windows = {
      padded[top : top + 16, left : left + 8].tobytes(): (top, left)
      for top in range(5)
      for left in range(3)
    }
    seen = {
      windows[_apply(transforms.RandomShift(), image, seed)["image"].tobytes()]
      for seed in range(150)
    }
    self.assertEqual(seen, set(windows.values()))

  def test_small_images_move_by_a_pixel(self):
    image = np.full((4, 4, 1), 9, np.uint8)
    blanks = [
      (_apply(transforms.RandomShift(), image, seed)["image"] == 0).sum()
      for seed in range(60)
    ]
    self.assertEqual(set(blanks), {0, 4, 7})  # none, a side, two sides


class RandomCropFlipTest(parameterized.TestCase):
  @parameterized.parameters((30, 30), (4, 100), (100, 4), (1, 1))
  def test_size_whatever_the_aspect(self, rows, columns):
    crop = transforms.RandomCropFlip((8, 6))
    for seed in range(5):
      out = _apply(crop, _image((rows, columns, 3)), seed)["image"]
      self.assertEqual(out.shape, (8, 6, 3))

  def test_whole_area_is_the_image_or_its_mirror(self):
    image = _image((8, 8, 3))
    crop = transforms.RandomCropFlip((8, 8), (1.0, 1.0), (1.0, 1.0))
    outs = [_apply(crop, image, seed)["image"] for seed in range(20)]
    flipped = [np.array_equal(out, image[:, ::-1]) for out in outs]
    for out, mirror in zip(outs, flipped):
      np.testing.assert_array_equal(out, image[:, ::-1] if mirror else image)
    self.assertBetween(sum(flipped), 5, 15)

  def test_never_flips_rows(self):
    ramp = np.repeat(np.arange(64, dtype=np.uint8) * 4, 64).reshape(64, 64, 1)
    crop = transforms.RandomCropFlip((8, 8), (0.5, 1.0))
    for seed in range(10):
      out = _apply(crop, ramp, seed)["image"][..., 0].astype(int)
      self.assertTrue((np.diff(out, axis=0) > 0).all())

  def test_share_of_the_area_is_in_range(self):
    rows, columns = np.mgrid[:128, :128]
    image = np.stack([rows, columns, rows], -1).astype(np.uint8)
    crop = transforms.RandomCropFlip((32, 32), (0.25, 0.5))
    shares = []
    for seed in range(40):
      out = _apply(crop, image, seed)["image"].astype(int)
      height, width = (np.ptp(out[..., i]) * 32 / 31 for i in (0, 1))
      self.assertBetween(width / height, 0.65, 1.55)
      shares.append(height * width / 128**2)
    self.assertBetween(min(shares), 0.22, 0.33)
    self.assertBetween(max(shares), 0.42, 0.55)

  def test_crop_that_never_fits_is_the_centre_square(self):
    image = _image((4, 400, 3))
    crop = transforms.RandomCropFlip((4, 4), (0.9, 1.0))
    out = _apply(crop, image)["image"]
    centre = image[:, 198:202]
    self.assertTrue(
      np.array_equal(out, centre) or np.array_equal(out, centre[:, ::-1])
    )


class NormalizeTest(absltest.TestCase):
  def test_formula(self):
    image = _image((5, 4, 3))
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    out = _apply(transforms.Normalize(mean, std), image)["image"]
    self.assertEqual(out.dtype, np.float32)
    expected = (image / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


class ChoiceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("none", ["Resize"]),
    ("shift", ["Resize", "RandomShift"]),
    ("crop_flip", ["RandomCropFlip"]),
    ("center_flip", ["CenterCrop", "RandomFlip"]),
  )
  def test_augment_chooses_the_training_transforms(self, augment, names):
    data = DataConfig(augment=augment)
    chosen = transforms.train_transforms(data, _MODEL)
    self.assertEqual([type(t).__name__ for t in chosen], names)

  def test_evaluation_is_not_random(self):
    data = DataConfig(augment="crop_flip")
    chosen = transforms.eval_transforms(data, _MODEL)
    self.assertEqual(chosen[0], transforms.Resize((8, 8)))

  def test_centre_crop_of_training_is_that_of_evaluation(self):
    data = DataConfig(augment="center_flip")
    chosen = transforms.eval_transforms(data, _MODEL)
    self.assertEqual(chosen[0], transforms.CenterCrop((8, 8)))

  def test_eval_resize_crops_the_centre(self):
    chosen = transforms.eval_transforms(DataConfig(eval_resize=10), _MODEL)
    self.assertEqual(chosen[0], transforms.ResizeCenterCrop(10, (8, 8)))

  def test_further_changes_follow_crop_and_flip_in_timms_order(self):
    data = DataConfig(
      augment="crop_flip",
      auto_augment="rand-m9-mstd0.5-inc1",
      color_jitter=0.3,
      random_erasing=0.25,
      mean=(0.485, 0.456, 0.406),
      std=(0.229, 0.224, 0.225),
    )
    policy = RandAugmentPolicy(magnitude=9, spread=0.5, increasing=True)
    self.assertEqual(
      transforms.train_transforms(data, _MODEL),
      [
        transforms.RandomCropFlip((8, 8)),
        augment.RandAugment(policy, (124, 116, 104)),
        augment.ColorJitter(0.3),
        augment.RandomErasing(0.25, data.mean, data.std),
      ],
    )

  def test_three_augment(self):
    data = DataConfig(auto_augment="3a")
    chosen = transforms.train_transforms(data, _MODEL)
    self.assertEqual(chosen[1:], [augment.ThreeAugment()])

  def test_evaluation_normalizes_as_configured(self):
    data = DataConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    last = transforms.eval_transforms(data, _MODEL)[-1]
    self.assertEqual(last, transforms.Normalize(data.mean, data.std))


if __name__ == "__main__":
  absltest.main()
