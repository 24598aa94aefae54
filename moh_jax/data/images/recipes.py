"""Which transforms a run's examples go through."""

from moh_jax.config import Config
from moh_jax.data.images import latents, transforms


def is_latent(config: Config) -> bool:
  """Whether the model reads latents."""
  return "diffusion" in config.sections and config.diffusion.space == "latent"


def crops_center(config: Config, split: str) -> bool:
  """Whether images of a split go through ADM's centre crop."""
  if is_latent(config):
    return False
  center = config.data.augment == "center_flip"
  return center or (split == "val" and "diffusion" in config.sections)


def train_recipe(config: Config) -> list:
  """The transforms of training examples, in order.

  Images become pixels, latents samples of their posterior; random latents are
  ready as they are.
  """
  if config.data.source == "latents":
    return [latents.SampleLatent(config.diffusion.latent_scale)]
  if is_latent(config):
    return []
  return transforms.train_transforms(config.data, config.model)


def eval_recipe(config: Config) -> list:
  """The transforms of held-out examples, in order.

  Nothing is random. Diffusion models are always compared on the centre crop.
  """
  if config.data.source == "latents":
    return [latents.MeanLatent(config.diffusion.latent_scale)]
  if is_latent(config):
    return []
  chosen = transforms.eval_transforms(config.data, config.model)
  if crops_center(config, "val"):
    chosen[0] = transforms.CenterCrop(config.model.input_shape[:2])
  return chosen
