"""Loads the decoder of a public autoencoder as a function."""

import functools

import jax
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.convert.vae import load_vae
from moh_jax.models.generation import Decode
from moh_jax.models.vae import VAE
from moh_jax.models.vae_tiling import apply_tiled
from moh_jax.runtime import sharding

_SMALLEST_TILE = 16


def load_decoder(
  path: str, config: Config, mesh: Mesh, *, tile: int = 0
) -> Decode:
  """Reads an autoencoder and checks that it fits a diffusion model.

  Args:
    path: weights, see `convert.vae.load_vae`.
    config: config of the diffusion model.
    mesh: the devices; each holds all weights.
    tile: decode latents in overlapping squares of this many latent pixels,
      which bounds the memory; 0 decodes them whole.

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
  vae = VAE(vae_config)
  params = jax.device_put(params, sharding.replicated(mesh))

  @jax.jit
  def decode(params, latents):
    return vae.apply({"params": params}, latents, method="decode")

  whole = functools.partial(decode, params)
  if not tile:
    return whole
  return lambda latents: apply_tiled(whole, latents, tile, tile // 4)
