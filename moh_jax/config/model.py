"""What model sections of several families share."""

import dataclasses
from typing import Any, Protocol, TypeVar

from moh_jax.config.dit import DiTConfig
from moh_jax.config.llm import LLMConfig
from moh_jax.config.vit import ViTConfig

_Model = TypeVar("_Model", ViTConfig, DiTConfig, LLMConfig)


class ImageModel(Protocol):
  """What the data pipeline needs to know of a model that reads images.

  Attributes:
    channels: of the input.
    num_classes: labels.
    input_shape: rows, columns and channels of an example.
  """

  channels: int
  num_classes: int
  input_shape: tuple[int, int, int]


def without_router(model: _Model, **changes: Any) -> _Model:
  """The multi-head baseline of a model: the same network, router off.

  Args:
    model: the section.
    **changes: further fields to change.
  """
  off = dataclasses.replace(model.router, kind="none")
  return dataclasses.replace(model, router=off, **changes)
