"""Networks by their config, and released models by name."""

from typing import Any

import flax.linen as nn
import jax

from moh_jax.config import Config, get_family, imported, released_model


def make_model(
  config: Config,
) -> tuple[nn.Module, tuple[jax.ShapeDtypeStruct, ...]]:
  """The configured network.

  Args:
    config: of the run.

  Returns:
    The Linen module, and its abstract positional inputs with a batch of one.

  Raises:
    ValueError: a field of the model is left to the data, see
      `data.infer.resolve`.
  """
  model = config.model
  model.check_complete()
  network = imported(get_family(model.family).network)(model)
  inputs = (jax.ShapeDtypeStruct(*each) for each in model.example_inputs)
  return network, tuple(inputs)


def get_model(name: str) -> tuple[nn.Module, Any]:
  """A released model by name, with parameters yet to be initialised.

  Args:
    name: such as "moh-vit-s80".

  Returns:
    The Linen module, and its model section.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  section = released_model(name)
  return imported(get_family(section.family).network)(section), section
