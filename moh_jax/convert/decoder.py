"""Loads the decoder of a public autoencoder as a function."""

import functools
import logging
from typing import Any

import jax
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.config.autoencoder import LatentScaling, VAEConfig
from moh_jax.convert.vae import load_vae
from moh_jax.models.generation import Decode
from moh_jax.models.vae import VAE
from moh_jax.models.vae_tiling import apply_tiled
from moh_jax.models.weights_hash import encoder_sha256
from moh_jax.runtime import sharding

_LOG = logging.getLogger(__name__)
_SMALLEST_TILE = 16


def load_decoder(
  path: str, config: Config, mesh: Mesh, *, tile: int = 0, encoder: str = ""
) -> Decode:
  """Reads an autoencoder and checks that it fits a diffusion model.

  Args:
    path: weights, see `convert.vae.load_vae`.
    config: config of the diffusion model.
    mesh: the devices; each holds all weights.
    tile: decode latents in overlapping squares of this many latent pixels,
      which bounds the memory; 0 decodes them whole.
    encoder: hash of the encoder that made the latents of the training. Where
      the autoencoder has another one, or scales latents otherwise, a warning
      says so.

  Returns:
    A function from latents [B, x, y, channels] to images [B, X, Y, 3] with
    pixels in [-1, 1].

  Raises:
    FileNotFoundError: there are no such weights.
    ValueError: the model has no latents or another number of channels, the tile
      is too small, or tiles are used with several processes.
  """
  diffusion = config.sections.get("diffusion")
  if diffusion is None or diffusion.space != "latent":
    raise ValueError(f"--vae {path!r}: the model does not work on latents")
  if tile and (tile < _SMALLEST_TILE or jax.process_count() > 1):
    raise ValueError(
      f"--vae-tile {tile} must be at least {_SMALLEST_TILE}, in one process"
    )
  vae_config, params = load_vae(path)
  if vae_config.latent_channels != config.model.channels:
    raise ValueError(
      f"--vae {path!r}: its {vae_config.latent_channels} latent channels must "
      f"be model.channels={config.model.channels}"
    )
  _warn_of_others(path, vae_config, params, diffusion.scaling, encoder)
  vae = VAE(vae_config)
  params = jax.device_put(params, sharding.replicated(mesh))

  @jax.jit
  def decode(params, latents):
    return vae.apply({"params": params}, latents, method="decode")

  whole = functools.partial(decode, params)
  if not tile:
    return whole
  return lambda latents: apply_tiled(whole, latents, tile, tile // 4)


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
