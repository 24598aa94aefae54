"""Operations against timm's own results, see tests/tools/record_augment.py."""

import pathlib

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.data.augment import INCREASING, PLAIN
from moh_jax.data.decode import to_array, to_picture

FILE = pathlib.Path(__file__).parents[2] / "goldens" / "timm_1.0.31.npz"
_FILLS = {"rgb": (124, 116, 104), "grey": 77}
_ALL = INCREASING | PLAIN


def recorded(mode):
  """The photograph [X, Y, channels], and timm's results by case."""
  with np.load(FILE) as file:
    suffix = "" if mode == "rgb" else "_grey"
    photograph = file[f"photograph{suffix}"].reshape(24, 32, -1)
    images, places = file[f"images_{mode}"], file[f"places_{mode}"]
    names = file[f"names_{mode}"].tolist()
  made = {
    name.partition("/")[0]: images[place].reshape(photograph.shape)
    for name, place in zip(names, places, strict=True)
  }
  return photograph, made


class OperationsTest(parameterized.TestCase):
  @parameterized.parameters("rgb", "grey")
  def test_pixels_are_timms_at_every_level_and_sign(self, mode):
    photograph, made = recorded(mode)
    seen = set()
    for case, expected in made.items():
      if case.startswith("3a"):
        continue
      sign = "+" if "+" in case else "-"
      name, _, magnitude = case.partition(sign)
      operation = _ALL[name]
      level = int(magnitude) / 10
      if operation.signed and sign == "-":
        level = -level
      picture = operation.apply(to_picture(photograph), level, _FILLS[mode])
      np.testing.assert_array_equal(to_array(picture), expected, err_msg=case)
      seen.add((name, sign, magnitude))
    self.assertLen(seen, len(_ALL) * 2 * 4)

  def test_sets_are_timms(self):
    _, made = recorded("rgb")
    names = {case.rstrip("0123456789+-") for case in made}
    self.assertEqual(names - {"3a_solarize", "3a_grey", "3a_blur"}, set(_ALL))
    self.assertEqual((len(PLAIN), len(INCREASING)), (15, 15))
    self.assertLen(set(PLAIN) & set(INCREASING), 9)

  @parameterized.parameters(*_ALL)
  def test_magnitude_above_the_usual_range(self, name):
    photograph, _ = recorded("rgb")
    for level in (2.0, -2.0)[: 1 + _ALL[name].signed]:
      picture = _ALL[name].apply(to_picture(photograph), level, (0, 0, 0))
      self.assertEqual(picture.size, (32, 24))

  def test_posterize_without_bits_is_black(self):
    picture = Image.new("RGB", (4, 4), (255, 255, 255))
    none = INCREASING["PosterizeIncreasing"].apply(picture, 1.0, None)
    self.assertEqual(to_array(none).max(), 0)
    one = INCREASING["PosterizeIncreasing"].apply(picture, 0.9, None)
    self.assertEqual(to_array(one).min(), 128)


if __name__ == "__main__":
  absltest.main()
