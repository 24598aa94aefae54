"""Config to network."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.models.dit import DiT
from moh_jax.models.vit import ViT


def make_model(config: Config) -> tuple[nn.Module, tuple]:
  """The configured network and its abstract inputs.

  Args:
    config: the run.

  Returns:
    The Linen module, and its positional arguments as ShapeDtypeStructs with a
    batch of 1.
  """
  model = config.model
  example = jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32)
  if model.family == "dit":
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    return DiT(model), (example, number, number)
  return ViT(model), (example,)
