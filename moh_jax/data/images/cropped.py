"""Images that are decoded as far as their random crop needs."""

import dataclasses
from typing import Any

import grain
import numpy as np

from moh_jax.config import Config
from moh_jax.config.image_data import FILE_SOURCES
from moh_jax.data.images.tolerant import CheckedSource
from moh_jax.data.images.transforms import RandomCropFlip

Example = dict[str, Any]


def crop_when_read(
  config: Config, source: Any, recipe: list
) -> tuple[Any, list]:
  """Lets a training stream decode less where `data.decode` says so.

  Args:
    config: config of the run.
    source: of `make_source`.
    recipe: transforms of its examples.

  Returns:
    Source and recipe of the same stream. Where the first transform is a random
    crop of image files, and may decode less, the source has the numbers of the
    images, and the first transform reads them.
  """
  # Copies of an image share one decoding of all of it.
  decodes_less = config.data.decode != "exact" and config.data.repeats == 1
  from_files = config.data.source in FILE_SOURCES
  if not (decodes_less and from_files and recipe):
    return source, recipe
  crop, *rest = recipe
  if not isinstance(crop, RandomCropFlip):
    return source, recipe
  return range(len(source)), [_ReadAndCrop(source, crop), *rest]


@dataclasses.dataclass(frozen=True)
class _ReadAndCrop(grain.transforms.RandomMap):
  """Maps the number of an image to its example, cropped."""

  source: CheckedSource
  crop: RandomCropFlip

  def random_map(self, element: int, rng: np.random.Generator) -> Example:
    """Reads and crops image number `element`."""

    def fit(example: Example) -> Example:
      return self.crop.random_map(example, rng)

    return self.source.fitted(element, fit)
