"""Images that are decoded as far as their crop needs."""

import dataclasses
from typing import Any

import grain
import numpy as np

from moh_jax.config import Config
from moh_jax.config.data import FILE_SOURCES
from moh_jax.data.images.tolerant import CheckedSource
from moh_jax.data.images.transforms import RandomCropFlip, ResizeCenterCrop

Example = dict[str, Any]


def crop_when_read(
  config: Config, source: Any, recipe: list
) -> tuple[grain.MapDataset, list]:
  """The examples of a source; crops of them decode no more than they need.

  Args:
    config: config of the run.
    source: of `make_source`.
    recipe: transforms of its examples.

  Returns:
    Elements of the stream, and its recipe. Where the first transform is a crop
    of image files, the elements are the numbers of the images, and the first
    transform reads them.
  """
  examples = grain.MapDataset.source(source)
  if config.data.source not in FILE_SOURCES or not recipe:
    return examples, recipe
  numbers = grain.MapDataset.range(len(source))
  crop, *rest = recipe
  if isinstance(crop, ResizeCenterCrop):
    return numbers, [_ReadAndCrop(source, crop), *rest]
  # Copies of an image share one decoding of all of it.
  if isinstance(crop, RandomCropFlip) and config.data.repeats == 1:
    return numbers, [_ReadAndCropAtRandom(source, crop), *rest]
  return examples, recipe


@dataclasses.dataclass(frozen=True)
class _ReadAndCrop(grain.transforms.Map):
  """Maps the number of an image to its example, cropped."""

  source: CheckedSource
  crop: ResizeCenterCrop

  def map(self, element: int) -> Example:
    """Reads and crops image number `element`."""
    return self.source.fitted(element, self.crop.map)


@dataclasses.dataclass(frozen=True)
class _ReadAndCropAtRandom(grain.transforms.RandomMap):
  """Maps the number of an image to its example, cropped at random."""

  source: CheckedSource
  crop: RandomCropFlip

  def random_map(self, element: int, rng: np.random.Generator) -> Example:
    """Reads and crops image number `element`."""

    def fit(example: Example) -> Example:
      return self.crop.random_map(example, rng)

    return self.source.fitted(element, fit)
