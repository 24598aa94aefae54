"""Hashes that tell networks apart, whatever files they came from."""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
from flax import traverse_util

from moh_jax.config.dit import VAEConfig

# What decides which latents an image has; decoders are exchanged.
_ENCODER = ("encoder", "quant_conv")


def params_sha256(params: Any, sizes: str = "") -> str:
  """Hash of the parameters of a network.

  Args:
    params: tree of arrays, which count as float32.
    sizes: what else tells the network apart.
  """
  digest = hashlib.sha256(sizes.encode())
  flat = traverse_util.flatten_dict(params, sep="/")
  for name in sorted(flat):
    array = np.asarray(flat[name], np.float32)
    digest.update(f"{name} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def weights_sha256(config: VAEConfig, params: Any) -> str:
  """Hash of an autoencoder.

  Args:
    config: its sizes; how it computes, and how its latents are scaled later,
      do not count.
    params: its parameters.
  """
  sizes = dataclasses.asdict(dataclasses.replace(config, dtype="float32"))
  del sizes["scaling"]
  return params_sha256(params, json.dumps(sizes, sort_keys=True))


def encoder_sha256(config: VAEConfig, params: Any) -> str:
  """Hash of an autoencoder's encoder.

  Autoencoders that share it differ only in how they decode latents.

  Args:
    config: sizes of the autoencoder.
    params: its parameters.
  """
  part = {name: params[name] for name in _ENCODER if name in params}
  return weights_sha256(config, part)
