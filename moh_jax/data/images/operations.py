"""The operations of RandAugment on Pillow's images, with timm's ranges.

Pixels are those of timm 1.0.31: what a magnitude means, signs, bicubic
resampling, the colour of what comes into view.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

from moh_jax.data.images.sliding import slide_rows

Picture = Image.Image
_SOLARIZED = 128  # pixels below this are brightened by solarize_add


@dataclasses.dataclass(frozen=True)
class Operation:
  """One kind of change.

  Attributes:
    change: maps (image, argument, fill) to the changed image.
    argument: of `change`, from the level: magnitude / 10, negated for half of
      the images where `signed`. None is for changes without an argument.
    signed: whether the level may be negative.
  """

  change: Callable[[Picture, Any, Any], Picture]
  argument: Callable[[float], Any] | None = None
  signed: bool = False

  def apply(self, picture: Picture, level: float, fill: Any) -> Picture:
    """Changes an image.

    Args:
      picture: grey or RGB.
      level: magnitude / 10, negated or not.
      fill: grey value or RGB of what comes into view.
    """
    return self.change(picture, self.argument and self.argument(level), fill)


def _shear_x(picture: Picture, slope: float, fill: Any) -> Picture:
  return slide_rows(picture, slope, 0, fill)


def _shear_y(picture: Picture, slope: float, fill: Any) -> Picture:
  return _of_columns(_shear_x, picture, slope, fill)


def _translate_x(picture: Picture, share: float, fill: Any) -> Picture:
  return slide_rows(picture, 0, share * picture.width, fill)


def _translate_y(picture: Picture, share: float, fill: Any) -> Picture:
  return _of_columns(_translate_x, picture, share, fill)


def _of_columns(
  change: Callable, picture: Picture, argument: float, fill: Any
) -> Picture:
  """Changes the columns of an image as `change` does its rows."""
  transpose = Image.Transpose.TRANSPOSE
  changed = change(picture.transpose(transpose), argument, fill)
  return changed.transpose(transpose)


def _rotate(picture: Picture, degrees: float, fill: Any) -> Picture:
  bicubic = Image.Resampling.BICUBIC
  return picture.rotate(degrees, resample=bicubic, fillcolor=fill)


def _lookup(picture: Picture, table: list[int]) -> Picture:
  return picture.point(table * len(picture.getbands()))


def _posterize(picture: Picture, bits: int, _: Any) -> Picture:
  """Keeps the highest bits; without any the image is black.

  Pillow's own function refuses 0 bits since version 12, but the magnitudes of
  the usual policies come to it.
  """
  if bits >= 8:
    return picture
  mask = 256 - 2 ** (8 - max(bits, 0))
  return _lookup(picture, [value & mask for value in range(256)])


def _solarize_add(picture: Picture, add: int, _: Any) -> Picture:
  return _lookup(
    picture,
    [
      min(255, value + add) if value < _SOLARIZED else value
      for value in range(256)
    ],
  )


def _enhance(kind: Callable[[Picture], Any]) -> Callable:
  return lambda picture, factor, _: kind(picture).enhance(factor)


def _posterize_bits(level: float) -> int:
  return int(level * 4)


def _solarize_from(level: float) -> int:
  return min(256, int(level * 256))


def _factor(level: float) -> float:
  return level * 1.8 + 0.1


def _increasing_factor(level: float) -> float:
  return max(0.1, 1.0 + level * 0.9)


def _solarize(picture: Picture, threshold: int, _: Any) -> Picture:
  return ImageOps.solarize(picture, threshold)


def _shear_slope(level: float) -> float:
  return level * 0.3


def _translate_share(level: float) -> float:
  return level * 0.45


_ALWAYS = {
  "AutoContrast": Operation(lambda picture, *_: ImageOps.autocontrast(picture)),
  "Equalize": Operation(lambda picture, *_: ImageOps.equalize(picture)),
  "Invert": Operation(lambda picture, *_: ImageOps.invert(picture)),
  "Rotate": Operation(_rotate, lambda level: level * 30.0, signed=True),
  "SolarizeAdd": Operation(
    _solarize_add, lambda level: min(128, int(level * 110))
  ),
  "ShearX": Operation(_shear_x, _shear_slope, signed=True),
  "ShearY": Operation(_shear_y, _shear_slope, signed=True),
  "TranslateXRel": Operation(_translate_x, _translate_share, signed=True),
  "TranslateYRel": Operation(_translate_y, _translate_share, signed=True),
}
_ENHANCED = {
  kind.__name__: _enhance(kind)
  for kind in (
    ImageEnhance.Color,
    ImageEnhance.Contrast,
    ImageEnhance.Brightness,
    ImageEnhance.Sharpness,
  )
}
# Operations by the name that timm gives them. In the first set some change less
# at larger magnitudes, in the second ("inc1") none does.
PLAIN = _ALWAYS | {
  "Posterize": Operation(_posterize, _posterize_bits),
  "Solarize": Operation(_solarize, _solarize_from),
  **{name: Operation(change, _factor) for name, change in _ENHANCED.items()},
}
INCREASING = _ALWAYS | {
  "PosterizeIncreasing": Operation(
    _posterize, lambda level: 4 - _posterize_bits(level)
  ),
  "SolarizeIncreasing": Operation(
    _solarize, lambda level: 256 - _solarize_from(level)
  ),
  **{
    f"{name}Increasing": Operation(change, _increasing_factor, signed=True)
    for name, change in _ENHANCED.items()
  },
}
