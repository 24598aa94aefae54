"""What encoding reads and writes: images in, a set of latents out."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any, Protocol

import numpy as np
from flax import traverse_util

from moh_jax.config.autoencoder import VAEConfig
from moh_jax.config.checks import at_least, one_of
from moh_jax.config.sections import BAD_IMAGES
from moh_jax.data.images.latents import KIND
from moh_jax.data.images.records import ArrayRecordSource
from moh_jax.data.images.sources import ImageFolderSource
from moh_jax.data.shard_writer import ShardSetWriter
from moh_jax.data.shards import METADATA


class NamedSource(Protocol):
  """Images that know their names."""

  class_names: tuple[str, ...]
  channels: int
  fingerprint: str

  def __len__(self) -> int:
    """Number of images."""

  def __getitem__(self, index: int) -> dict[str, Any]:
    """One example: "image" [X, Y, channels] uint8 and "label" int32."""

  def name(self, index: int) -> str:
    """The image's name."""


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
  """How images become latents.

  Attributes:
    image_size: rows and columns of ADM's centre crop.
    latent_scale: noted for training; the stored moments are not scaled.
    batch_size: images that this process's devices encode at a time.
    shard_size: images of a shard.
    bad_images: "raise", or "skip": leave out what cannot be read or is smaller
      than `image_size`.
    threads: that read and crop.
  """

  image_size: int = 256
  latent_scale: float = 0.18215
  batch_size: int = 32
  shard_size: int = 1024
  bad_images: str = "raise"
  threads: int = 8

  def __post_init__(self):
    for name in ("image_size", "batch_size", "shard_size", "threads"):
      at_least("encode", 1, **{name: getattr(self, name)})
    if not 0 < self.latent_scale < float("inf"):
      raise ValueError(f"latent_scale={self.latent_scale} must be above 0")
    one_of("encode", BAD_IMAGES, bad_images=self.bad_images)


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
