"""A public autoencoder beside a diffusion model: its decoder and encoder."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.dit import LatentScaling, VAEConfig
from moh_jax.convert.vae import load_vae
from moh_jax.models.generation import Decode
from moh_jax.models.vae import VAE
from moh_jax.models.vae_tiling import apply_tiled
from moh_jax.models.weights_hash import encoder_sha256
from moh_jax.runtime import sharding

_LOG = logging.getLogger(__name__)
_SMALLEST_TILE = 16


@dataclasses.dataclass(frozen=True)
class Autoencoder:
  """A public autoencoder that fits a diffusion model, its weights on the mesh.

  Attributes:
    config: its sizes.
    params: its weights; each device of the mesh holds all of them.
    scaling: how the diffusion model reads latents.
  """

  config: VAEConfig
  params: Any
  scaling: LatentScaling

  def decoder(self, tile: int = 0) -> Decode:
    """Makes the function from latents to images.

    Args:
      tile: decode latents in overlapping squares of this many latent pixels,
        which bounds the memory; 0 decodes them whole.

    Returns:
      A function from latents [B, x, y, channels] to images [B, X, Y, 3] with
      pixels in [-1, 1].

    Raises:
      ValueError: the tile is too small, or there are several processes.
    """
    if tile and (tile < _SMALLEST_TILE or jax.process_count() > 1):
      raise ValueError(
        f"--vae-tile {tile} must be at least {_SMALLEST_TILE}, in one process"
      )
    vae = VAE(self.config)

    @jax.jit
    def decode(params: Any, latents: jax.Array) -> jax.Array:
      return vae.apply({"params": params}, latents, method="decode")

    whole = functools.partial(decode, self.params)
    if not tile:
      return whole
    return lambda latents: apply_tiled(whole, latents, tile, tile // 4)

  def encoder(self) -> Callable[[np.ndarray], jax.Array]:
    """Makes the function from images to the input of the diffusion model.

    Returns:
      A function from images [B, X, Y, 3] with pixels in [-1, 1] to the means of
      their latents [B, x, y, channels], scaled as the model reads them.
    """
    vae = VAE(self.config)
    parts = self.scaling.affine(self.config.latent_channels)
    offset, factor = (np.float32(part)[None, None, None] for part in parts)

    @jax.jit
    def encode(params: Any, images: jax.Array) -> jax.Array:
      mean, _ = vae.apply({"params": params}, images, method="encode")
      return (mean.astype(jnp.float32) - offset) * factor

    return functools.partial(encode, self.params)


def load_autoencoder(
  path: str, config: Config, mesh: Mesh, *, encoder: str = ""
) -> Autoencoder:
  """Reads an autoencoder and checks that it fits a diffusion model.

  Args:
    path: weights, see `convert.vae.load_vae`.
    config: config of the diffusion model.
    mesh: the devices.
    encoder: hash of the encoder that made the latents of the training. Where
      the autoencoder has another one, or scales latents otherwise, a warning
      says so.

  Raises:
    FileNotFoundError: there are no such weights.
    ValueError: the model has no latents or another number of channels.
  """
  diffusion = config.sections.get("diffusion")
  if diffusion is None or diffusion.space != "latent":
    raise ValueError(f"--vae {path!r}: the model does not work on latents")
  vae_config, params = load_vae(path)
  if vae_config.latent_channels != config.model.channels:
    raise ValueError(
      f"--vae {path!r}: its {vae_config.latent_channels} latent channels must "
      f"be model.channels={config.model.channels}"
    )
  _warn_of_others(path, vae_config, params, diffusion.scaling, encoder)
  params = jax.device_put(params, sharding.replicated(mesh))
  return Autoencoder(vae_config, params, diffusion.scaling)


def _warn_of_others(
  path: str,
  config: VAEConfig,
  params: Any,
  scaling: LatentScaling,
  encoder: str,
) -> None:
  """Says so where the latents of the training seem to be another's."""
  if differing := config.scaling.differences(scaling):
    _LOG.warning(
      "--vae %s: its latents are scaled with %s as those that the model was "
      "trained on; the model's scaling is used",
      path,
      "; ".join(differing),
    )
  if encoder and encoder_sha256(config, params) != encoder:
    _LOG.warning(
      "--vae %s: its encoder is not the one that made the latents of the "
      "training: images may come out wrong",
      path,
    )
