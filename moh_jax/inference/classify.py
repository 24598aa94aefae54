"""Class probabilities of image files."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from moh_jax.data.images.sources import read_image
from moh_jax.data.images.transforms import eval_transforms
from moh_jax.inference.restore import Restored


@dataclasses.dataclass(frozen=True)
class Prediction:
  """One class of one image.

  Attributes:
    label: class index.
    name: class name, or the index as text where the checkpoint has no names.
    probability: softmax probability.
  """

  label: int
  name: str
  probability: float


def classify(
  restored: Restored, files: Sequence[str], *, top: int = 5
) -> list[list[Prediction]]:
  """Classifies image files of any format Pillow reads.

  All files are read and checked before the model runs. Each goes through the
  transforms of evaluation: channels, size and normalization are the config's.

  Args:
    restored: an image classifier.
    files: paths.
    top: classes per image, most probable first.

  Returns:
    Per file, its `top` predictions (fewer if the model has fewer classes).

  Raises:
    FileNotFoundError: a file does not exist.
    ValueError: a file is no image or a damaged one.
  """
  if top < 1:
    raise ValueError(f"top={top} must be at least 1")
  config = restored.config
  examples = [
    {"image": read_image(file, config.model.channels)} for file in files
  ]
  for transform in eval_transforms(config.data, config.model):
    examples = [transform.map(example) for example in examples]
  images = np.stack([example["image"] for example in examples])

  @jax.jit
  def probabilities(params, image):
    logits, _ = restored.model.apply({"params": params}, image[None])
    return jax.nn.softmax(logits[0])

  # One at a time: a single compilation whatever the number of files.
  rows = [np.asarray(probabilities(restored.params, x)) for x in images]
  return [_best(row, restored.class_names, top) for row in rows]


def _best(
  row: np.ndarray, names: tuple[str, ...], top: int
) -> list[Prediction]:
  order = np.argsort(-row, kind="stable")[:top]
  return [
    Prediction(int(i), names[i] if names else str(i), float(row[i]))
    for i in order
  ]
