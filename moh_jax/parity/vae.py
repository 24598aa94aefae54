"""Recorded cases of the Stable Diffusion autoencoder."""

import functools
from typing import Any

import jax
import numpy as np

from moh_jax.convert.vae import convert_vae, public_config
from moh_jax.data.latents import sample_posterior
from moh_jax.models.vae import VAE
from moh_jax.parity.case import Case, channels_first, channels_last


def autoencoder(case: Case) -> dict[str, Any]:
  """Results of an autoencoder case.

  Returns:
    Mean and log-variance of the encoder's Gaussian, a sample from it, and the
    images decoded from recorded latents and from the mean.
  """
  arrays = case.arrays
  config = public_config(case.hyper)
  params = {"params": convert_vae(case.weights, config, source="weights")}
  encode, decode = (
    functools.partial(
      jax.jit(VAE(config).apply, static_argnames="method"),
      params,
      method=method,
    )
    for method in ("encode", "decode")
  )
  mean, logvar = encode(channels_last(arrays["image"]))
  noise = np.asarray(channels_last(arrays["sample_eps"]))
  results = {
    "mean": mean,
    "logvar": logvar,
    "sample": sample_posterior(np.asarray(mean), np.asarray(logvar), noise),
    "decoded": decode(channels_last(arrays["z"])),
    "mode_reconstruction": decode(mean),
  }
  return {name: channels_first(x) for name, x in results.items()}
