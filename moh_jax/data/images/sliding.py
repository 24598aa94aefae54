"""Rows of an image that slide, with the pixels of Pillow's `transform`.

Pillow computes four cubic polynomials along rows and one along columns for each
pixel, whatever the matrix. Where rows only slide, one of the five is enough.
"""

import threading
from typing import Any

import numpy as np
from PIL import Image

_OF_THREAD = threading.local()


def slide_rows(
  picture: Image.Image, slope: float, offset: float, fill: Any
) -> Image.Image:
  """Shears and translates an image along its rows.

  The result is that of `picture.transform` with the matrix (1, slope, offset,
  0, 1, 0) and bicubic resampling, bit for bit: the operations on float64 are
  the same ones in the same order.

  Args:
    picture: grey or RGB.
    slope: columns that a row moves to the left for each row from the top.
    offset: columns that all rows move to the left.
    fill: grey value or RGB of what comes into view.
  """
  columns, rows = picture.size
  places, beyond = _memory(rows, columns)
  centres = np.arange(max(columns, rows)) + 0.5
  np.add(centres[:columns], slope * centres[:rows, None], out=places)
  places += offset
  outside = (places < 0) | (places >= columns)
  places -= 0.5
  left = np.floor(places, out=beyond)  # the pixel at or left of a place
  start = left[:, 0].astype(int)
  np.subtract(places, left, out=beyond)
  if np.ptp(beyond, axis=1).max() > 0.5:
    # Places of one row were rounded to different sides of a whole number.
    return picture.transform(
      picture.size,
      Image.Transform.AFFINE,
      (1, slope, offset, 0, 1, 0),
      resample=Image.Resampling.BICUBIC,
      fillcolor=fill,
    )
  fills = fill if isinstance(fill, tuple) else (fill,)
  bands = []
  for band, filled in zip(picture.split(), fills):
    moved = _cubic(_windows(np.asarray(band), start - 1), beyond, places)
    moved[outside] = filled
    bands.append(Image.fromarray(moved))
  return Image.merge(picture.mode, bands)


def _memory(rows: int, columns: int) -> np.ndarray:
  """Two arrays [rows, columns] float64 that a thread uses again.

  Fresh memory would take as long as the arithmetic.
  """
  kept = getattr(_OF_THREAD, "memory", None)
  if kept is None or kept.shape[1:] != (rows, columns):
    kept = _OF_THREAD.memory = np.empty((2, rows, columns))
  return kept


def _windows(band: np.ndarray, start: np.ndarray) -> np.ndarray:
  """Parts of the rows of a band, which its edges continue.

  Args:
    band: [X, Y] uint8.
    start: [X] first column of each part; may be outside of the band.

  Returns:
    [X, Y + 3] int16. What is more than two columns outside is 0.
  """
  rows, columns = band.shape
  before = max(2, -int(start.min()))
  after = max(2, int(start.max()) + 3)
  end = before + columns
  padded = np.zeros((rows, end + after), np.uint8)
  padded[:, before - 2 : before] = band[:, :1]
  padded[:, before:end] = band
  padded[:, end : end + 2] = band[:, -1:]
  parts = np.lib.stride_tricks.sliding_window_view(padded, columns + 3, axis=1)
  return parts[np.arange(rows), start + before].astype(np.int16)


def _cubic(
  taps: np.ndarray, beyond: np.ndarray, memory: np.ndarray
) -> np.ndarray:
  """Pillow's cubic polynomial through four neighbours.

  Args:
    taps: [X, Y + 3] int16; columns y to y + 3 are the neighbours of column y.
    beyond: [X, Y] float64, place between the second and the third one.
    memory: [X, Y] float64, overwritten.

  Returns:
    [X, Y] uint8.
  """
  steps = taps[:, 1:] - taps[:, :-1]
  first, second, third = steps[:, :-2], steps[:, 1:-1], steps[:, 2:]
  bend = first + third
  result = np.multiply(beyond, bend, out=memory)
  bend += first
  result -= bend
  result *= beyond
  result += first + second
  result *= beyond
  result += taps[:, 1:-2]
  return np.clip(result, 0, 255, out=result).astype(np.uint8)
