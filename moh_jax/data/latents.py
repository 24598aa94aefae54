"""Latents in shards, as `prepare encode-latents` writes and training reads.

The header of a record is {"label": 3, "name": "ant/1.jpg"}. The payload is a
little-endian float16 array [2, 2, X, Y, channels]: for the image and for its
mirror image, mean and log-variance of the autoencoder's posterior. float16
takes half the disk space of float32 (32 KiB for an image of 256 x 256 pixels).
It rounds a mean between 4 and 8 by at most 0.002; after `latent_scale` that is
0.0004, a 25th of the smallest noise of the training (0.01 at timestep 0).

metadata.json has the fields "class_names", "latent_shape", "latent_scale" (and
"latent_shift", "latent_mean", "latent_std" where the autoencoder has them),
"image_size", "vae", "vae_sha256", "encoder_sha256" and "encoded_from".
"""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import grain
import numpy as np

from moh_jax.config import Config
from moh_jax.config.dit import LatentScaling
from moh_jax.data.identity import Identity
from moh_jax.data.shards import Shards, read_metadata
from moh_jax.data.sources import Example, ImageSource

KIND = "latents"
DTYPE = np.dtype("<f2")


class LatentSource(ImageSource):
  """Source of the latents in PATH/SPLIT/*.array_record.

  `source[i]` is {"image": [2, 2, X, Y, channels] float16, "label": int32}. The
  first axis is the image and its mirror image, the second mean and
  log-variance.
  """

  def __init__(self, path: str, split: str):
    """Opens a split.

    Args:
      path: directory of the splits, local or mounted.
      split: "train" or "val"; "" reads `path` itself.

    Raises:
      FileNotFoundError: metadata.json or a shard is missing.
      ValueError: the set holds no latents, or a shard is truncated.
    """
    self._shards = Shards(pathlib.Path(path) / split, KIND)
    self.metadata = self._shards.metadata
    self.class_names = tuple(self.metadata["class_names"])
    self.latent_shape = tuple(self.metadata["latent_shape"])
    self.channels = self.latent_shape[-1]
    self.scaling = stored_scaling(self.metadata)
    # "" in sets of older versions.
    self.encoder_sha256 = self.metadata.get("encoder_sha256", "")

  @classmethod
  def open(
    cls, config: Config, split: str, class_names: tuple[str, ...] = ()
  ) -> "LatentSource":
    """Opens a split.

    Raises:
      ValueError: the configured model does not take these latents.
    """
    del class_names
    source, model = cls(config.data.path, split), config.model
    if source.latent_shape != model.input_shape:
      raise ValueError(
        f"data.path={config.data.path!r} holds latents of shape "
        f"{source.latent_shape} (images of {source.metadata['image_size']} "
        f"pixels), the model takes {model.input_shape}: model.input_size and "
        "model.channels"
      )
    if differing := config.diffusion.scaling.differences(source.scaling):
      raise ValueError(
        f"data.path={config.data.path!r}: the model has diffusion.latent_"
        f"{'; diffusion.latent_'.join(differing)} as the latents"
      )
    return source

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """Classes and channels; also "scaling" and "encoder_sha256"."""
    del names
    metadata = read_metadata(pathlib.Path(config.data.path) / "train", KIND)
    return {
      "channels": metadata["latent_shape"][-1],
      "num_classes": len(metadata["class_names"]),
      "scaling": stored_scaling(metadata),
      "encoder_sha256": metadata.get("encoder_sha256", ""),
    }

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    return self._shards.identity()

  def __len__(self) -> int:
    return len(self._shards)

  def __getitem__(self, index: int) -> Example:
    header, payload = self._shards[index]
    shape = (2, 2, *self.latent_shape)
    if len(payload) != DTYPE.itemsize * math.prod(shape):
      raise ValueError(
        f"{self._shards.locate(index)}: {len(payload)} bytes, expected latents "
        f"of shape {self.latent_shape}"
      )
    moments = np.frombuffer(payload, DTYPE).reshape(shape)
    return {"image": moments, "label": np.int32(header["label"])}

  def name(self, index: int) -> str:
    """Names an example for messages, by its shard and position."""
    return self._shards.locate(index)


def stored_scaling(metadata: Mapping[str, Any]) -> LatentScaling:
  """How the latents of a set are scaled, from its metadata.json."""
  stored = {
    field.name: metadata.get(f"latent_{field.name}", field.default)
    for field in dataclasses.fields(LatentScaling)
  }
  for name in ("mean", "std"):
    stored[name] = tuple(stored[name])
  return LatentScaling(**stored)


def encode_moments(moments: np.ndarray) -> bytes:
  """Encodes the payload of a record.

  Args:
    moments: [2, 2, X, Y, channels] float, see the head of this file.

  Raises:
    ValueError: a value is not finite in float16.
  """
  with np.errstate(over="ignore"):
    stored = moments.astype(DTYPE)
  if not np.isfinite(stored).all():
    raise ValueError("the autoencoder's output is not finite in float16")
  return stored.tobytes()


def sample_posterior(
  mean: np.ndarray, log_variance: np.ndarray, noise: np.ndarray
) -> np.ndarray:
  """Samples latents: mean + exp(log_variance / 2) * noise.

  Args:
    mean: any shape.
    log_variance: the same shape.
    noise: standard normal noise of the same shape.
  """
  return mean + np.exp(0.5 * log_variance) * noise


@dataclasses.dataclass(frozen=True)
class SampleLatent(grain.transforms.RandomMap):
  """Samples a latent from the posterior of the image or of its mirror image."""

  scaling: LatentScaling

  def random_map(
    self, element: dict[str, Any], rng: np.random.Generator
  ) -> dict[str, Any]:
    """Maps "image" [2, 2, X, Y, channels] to [X, Y, channels] float32."""
    mirrored = int(rng.random() < 0.5)
    mean, log_variance = element["image"][mirrored].astype(np.float32)
    noise = rng.standard_normal(mean.shape, np.float32)
    latent = sample_posterior(mean, log_variance, noise)
    return {**element, "image": _scaled(latent, self.scaling)}


@dataclasses.dataclass(frozen=True)
class MeanLatent(grain.transforms.Map):
  """Takes the posterior's mean of the image that is not mirrored."""

  scaling: LatentScaling

  def map(self, element: dict[str, Any]) -> dict[str, Any]:
    """Maps "image" [2, 2, X, Y, channels] to [X, Y, channels] float32."""
    mean = element["image"][0, 0].astype(np.float32)
    return {**element, "image": _scaled(mean, self.scaling)}


def _scaled(latent: np.ndarray, scaling: LatentScaling) -> np.ndarray:
  parts = scaling.affine(latent.shape[-1])
  offset, factor = (np.asarray(part, np.float32) for part in parts)
  return (latent - offset) * factor
