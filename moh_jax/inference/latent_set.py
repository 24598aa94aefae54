"""What encoding reads and writes: images in, a set of latents out."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
from flax import traverse_util

from moh_jax.config.autoencoder import VAEConfig
from moh_jax.data.images.latents import KIND
from moh_jax.data.images.records import ArrayRecordSource
from moh_jax.data.images.sources import ImageFolderSource
from moh_jax.data.shard_writer import ShardSetWriter
from moh_jax.data.shards import METADATA
from moh_jax.inference.options import EncodeOptions

# Images that know their names and the fingerprint of their list.
NamedSource = ArrayRecordSource | ImageFolderSource


def open_images(folder: str | os.PathLike, channels: int) -> NamedSource:
  """Images in folder/CLASS/*, or shards that `pack-images` wrote into it."""
  folder = os.fspath(folder)
  packed = (pathlib.Path(folder) / METADATA).is_file()
  source = ArrayRecordSource if packed else ImageFolderSource
  return source(folder, "", channels)


def weights_sha256(config: VAEConfig, params: Any) -> str:
  """A hash of an autoencoder, whatever the file that it came from.

  Args:
    config: its sizes; how it computes does not count.
    params: its parameters.
  """
  digest = hashlib.sha256()
  sizes = dataclasses.asdict(dataclasses.replace(config, dtype="float32"))
  digest.update(json.dumps(sizes, sort_keys=True).encode())
  flat = traverse_util.flatten_dict(params, sep="/")
  for name in sorted(flat):
    array = np.asarray(flat[name], np.float32)
    digest.update(f"{name} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def open_latents(
  source: NamedSource,
  out: str | os.PathLike,
  config: VAEConfig,
  options: EncodeOptions,
  *,
  weights: str,
  notes: dict[str, str],
) -> ShardSetWriter:
  """Starts a set of latents, or continues an interrupted one.

  Args:
    source: the images.
    out: folder of the set, local or mounted, the same for all processes.
    config: the autoencoder.
    options: sizes.
    weights: `weights_sha256` of the autoencoder.
    notes: "vae" and "encoded_from", for the reader of metadata.json.

  Raises:
    ValueError: sizes do not fit, or `out` holds latents of other settings.
  """
  side, step = options.image_size, config.downscale
  if side % step:
    raise ValueError(f"image_size={side} must be a multiple of {step}")
  return ShardSetWriter(
    out,
    KIND,
    items=len(source),
    shard_size=options.shard_size,
    settings={
      "image_size": side,
      "latent_shape": (side // step, side // step, config.latent_channels),
      "latent_scale": options.latent_scale,
      "vae_sha256": weights,
      "compute_dtype": config.dtype,
      "images": source.fingerprint,
    },
    notes={**notes, "class_names": source.class_names},
  )
