"""Networks by their config, and released models by name."""

from typing import Any

import flax.linen as nn
import jax

from moh_jax.config import Config
from moh_jax.config.registry import get_family, released_model


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
  config.model.check_complete()
  return get_family(config.model.family).make_model(config)


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
  family = get_family(section.family)
  network, _ = family.make_model(family.bench_run(section, 1))
  return network, section
