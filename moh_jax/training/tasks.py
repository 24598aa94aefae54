"""The task of each family."""

from types import ModuleType

import flax.linen as nn

from moh_jax.config import Config
from moh_jax.models.generation import Decode
from moh_jax.training import classification, denoising, language_modeling
from moh_jax.training.task import Evaluate, Task

_FAMILIES: dict[str, ModuleType] = {
  "vit": classification,
  "dit": denoising,
  "llm": language_modeling,
}


def make_task(config: Config, decode: Decode | None = None) -> Task:
  """Builds the task of the configured family and opens its data.

  Args:
    config: the run.
    decode: latents to images in [-1, 1], for previews of latent diffusion.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  if config.model.family == "dit":
    return denoising.make_task(config, decode)
  return _FAMILIES[config.model.family].make_task(config)


def make_evaluate(
  model: nn.Module,
  config: Config,
  class_names: tuple[str, ...],
  tokenizer_sha256: str = "",
) -> Evaluate:
  """Opens the held-out split of the configured family alone.

  Args:
    model: the network.
    config: the run.
    class_names: that the model was trained with; empty if unknown.
    tokenizer_sha256: of the tokenizer it was trained with; "" if unknown.
  """
  family = _FAMILIES[config.model.family]
  if family is language_modeling:
    return family.make_evaluate(model, config, tokenizer_sha256)
  return family.make_evaluate(model, config, class_names)
