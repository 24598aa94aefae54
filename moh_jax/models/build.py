"""Config to network."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import Config, LayerStack
from moh_jax.models.dit import DiT
from moh_jax.models.llm import LLM, compute_dtypes, grow_vocabulary
from moh_jax.models.restack import restack
from moh_jax.models.vit import ViT


def fit_params(params: Any, trained: Config, wanted: Config) -> Any:
  """Parameters of a trained model as another config of it lays them out."""
  ours, theirs = trained.model, wanted.model
  if ours.family == "llm" and theirs.vocab_size > ours.vocab_size:
    params = grow_vocabulary(params, theirs.vocab_size)
  if isinstance(ours, LayerStack) and ours.depth == theirs.depth:
    before, after = (
      [group.depth for group in model.layer_groups()]
      for model in (ours, theirs)
    )
    if before != after:
      return restack(params, ours, theirs)
  return params


def inference_dtypes(params: Any, config: Config) -> Any:
  """The dtypes that parameters may be stored in without a change of outputs.

  Args:
    params: arrays or their shapes.
    config: the run.

  Returns:
    The tree with a dtype for every leaf.
  """
  if config.model.family == "llm":
    return compute_dtypes(params, config.model)
  # Ends and conditioning of the others compute in float32 whatever the dtype.
  return jax.tree.map(lambda x: x.dtype, params)


def make_model(config: Config) -> tuple[nn.Module, tuple]:
  """The configured network and its abstract inputs.

  Args:
    config: the run.

  Returns:
    The Linen module, and its positional arguments as ShapeDtypeStructs with a
    batch of 1.

  Raises:
    ValueError: a field of the model is left to the data.
  """
  model = config.model
  model.check_complete()
  if model.family == "llm":
    return LLM(model), (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
  example = jax.ShapeDtypeStruct((1, *model.input_shape), jnp.float32)
  if model.family == "dit":
    number = jax.ShapeDtypeStruct((1,), jnp.int32)
    return DiT(model), (example, number, number)
  return ViT(model), (example,)
