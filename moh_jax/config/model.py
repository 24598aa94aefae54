"""The model section: one dataclass per family."""

from typing import Protocol

from moh_jax.config.dit import DiTConfig
from moh_jax.config.vit import ViTConfig

MODEL_SECTIONS: dict[str, type] = {"vit": ViTConfig, "dit": DiTConfig}


class ImageModel(Protocol):
  """What the data room needs to know of a model that reads images.

  Attributes:
    channels: of the input.
    num_classes: labels.
    input_shape: rows, columns and channels of an example.
  """

  channels: int
  num_classes: int
  input_shape: tuple[int, int, int]
