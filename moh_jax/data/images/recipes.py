"""Chooses the transforms of a run's examples from its config."""

from moh_jax.config import Config
from moh_jax.data.images import latents, transforms


def is_latent(config: Config) -> bool:
  """Whether the model reads latents."""
  return "diffusion" in config.sections and config.diffusion.space == "latent"


def crops_center(config: Config, split: str) -> bool:
  """Whether images of a split get ADM's centre crop, see `CenterCrop`."""
  if is_latent(config):
    return False
  center = config.data.augment == "center_flip"
  return center or (split == "val" and "diffusion" in config.sections)


def train_recipe(config: Config) -> list:
  """The transforms of training examples, in order.

  They make uint8 pixels of the model's size, and samples of stored posteriors.
  The random latents of the source "fake" need none.
  """
  if config.data.source == "latents":
    return [latents.SampleLatent(config.diffusion.scaling)]
  if is_latent(config):
    return []
  return transforms.train_transforms(config.data, config.model)


def eval_recipe(config: Config) -> list:
  """The transforms of held-out examples, in order; none is random.

  Diffusion models are always evaluated on the centre crop.
  """
  if config.data.source == "latents":
    return [latents.MeanLatent(config.diffusion.scaling)]
  if is_latent(config):
    return []
  chosen = transforms.eval_transforms(config.data, config.model)[:-1]
  if crops_center(config, "val"):
    chosen[0] = transforms.CenterCrop(config.model.input_shape[:2])
  return chosen
