"""Recorded cases of the Stable Diffusion autoencoder."""

from typing import Any

import jax
import numpy as np

from moh_jax.convert.vae import convert_vae, public_config
from moh_jax.data.images.latents import sample_posterior
from moh_jax.models.vae import VAE
from moh_jax.parity.case import Case
from moh_jax.parity.layout import channels_first, channels_last


def autoencoder(case: Case) -> dict[str, Any]:
  """The encoder's Gaussian and a sample of it; decoded latents and means."""
  arrays, weights = case.arrays, case.weights
  config = public_config(case.hyper)
  model = VAE(config)
  params = convert_vae(weights, config, source="weights")

  @jax.jit
  def encode(params, images):
    return model.apply({"params": params}, images, method="encode")

  @jax.jit
  def decode(params, latents):
    return model.apply({"params": params}, latents, method="decode")

  mean, logvar = encode(params, channels_last(arrays["image"]))
  noise = np.asarray(channels_last(arrays["sample_eps"]))
  results = {
    "mean": mean,
    "logvar": logvar,
    "sample": sample_posterior(np.asarray(mean), np.asarray(logvar), noise),
    "decoded": decode(params, channels_last(arrays["z"])),
    "mode_reconstruction": decode(params, mean),
  }
  return {name: channels_first(x) for name, x in results.items()}
