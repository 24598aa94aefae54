"""Images at a size that is seen, with names beneath, for grids."""

import pathlib
from collections.abc import Sequence

import numpy as np

from moh_jax.data.decode import to_array, to_picture
from moh_jax.runtime.files import printable_name

_SEEN = 112  # columns that an image is enlarged to in a grid


def grid_zoom(width: int, zoom: int = 0) -> int:
  """How often a grid repeats pixels of images so wide, see `tiles`."""
  return zoom or -(-_SEEN // width)


def tiles(
  images: np.ndarray, names: Sequence[str] = (), zoom: int = 0
) -> np.ndarray:
  """Images at a size that is seen, with names beneath.

  Args:
    images: [B, X, Y, 1 or 3] uint8.
    names: of the images, cut to their width; () writes none.
    zoom: how often a pixel is repeated in each direction; 0 makes an image at
      least 112 pixels wide.
  """
  zoom = grid_zoom(images.shape[2], zoom)
  images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
  if not names:
    return images
  from matplotlib import get_data_path  # has a font of more than ASCII
  from PIL import ImageDraw, ImageFont

  (height, width), out = images.shape[1:3], []
  font = pathlib.Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")
  font = ImageFont.truetype(font, max(12, width // 9))
  margin = ((0, 0), (0, sum(font.getmetrics()) + 2), (0, 0), (0, 0))
  for image, name in zip(np.pad(images, margin, constant_values=255), names):
    text = printable_name(name)
    picture = to_picture(image)
    while font.getlength(text) > width - 2:
      text = text[:-1]
    ImageDraw.Draw(picture).text((1, height + 1), text, "black", font)
    out.append(to_array(picture))
  return np.stack(out)
