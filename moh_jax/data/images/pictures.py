"""Arrays to Pillow's images and back."""

import numpy as np
from PIL import Image


def to_picture(image: np.ndarray) -> Image.Image:
  """Makes Pillow's image of an array.

  Args:
    image: [X, Y, 1 or 3] uint8, grey or RGB.

  Raises:
    ValueError: it has other channels.
  """
  if image.shape[-1] not in (1, 3):
    raise ValueError(f"image of shape {image.shape} must have 1 or 3 channels")
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


def to_array(picture: Image.Image) -> np.ndarray:
  """The pixels [X, Y, channels] uint8 of a grey or RGB image."""
  image = np.asarray(picture)
  return image[..., None] if image.ndim == 2 else image
