"""Images to latents in shards, before a diffusion model is trained on them."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from moh_jax.config import MeshConfig
from moh_jax.config.dit import VAEConfig
from moh_jax.data import packed
from moh_jax.data.shards import OpenShard, ShardWriter
from moh_jax.data.sources import EncodedSource
from moh_jax.data.transforms import center_crop
from moh_jax.models.vae import VAE, encoder_sha256, weights_sha256
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import check_batch, make_mesh, replicated, use_mesh


def encode_latents(
  source: EncodedSource,
  out: str | os.PathLike,
  config: VAEConfig,
  params: Any,
  *,
  image_size: int = 256,
  batch_size: int = 32,
  shard_size: int = 1024,
  bad_images: str = "raise",
  notes: dict[str, str],
  devices: list | None = None,
) -> dict[str, Any]:
  """Encodes every image and its mirror image; continues an interrupted call.

  Args:
    source: the images.
    out: folder of the set, local or mounted.
    config: the autoencoder.
    params: its parameters, which are hashed.
    image_size: rows and columns of ADM's centre crop.
    batch_size: images that this process's devices encode at a time.
    shard_size: images of a shard.
    bad_images: "raise", or "skip": leave out what cannot be read.
    notes: "vae" and "encoded_from", for the reader of metadata.json.
    devices: None takes all of this process.

  Returns:
    The content of metadata.json.

  Raises:
    OSError: a shard could not be written; finished ones are whole.
    ValueError: an image cannot be read, with bad_images="raise", sizes do not
      fit, or `out` holds latents of other settings.
  """
  side, step = image_size, config.downscale
  if side % step:
    raise ValueError(f"image_size={side} must be a multiple of {step}")
  mesh = make_mesh(MeshConfig(), devices or jax.local_devices())
  check_batch("batch_size", batch_size, mesh)
  settings = {
    "image_size": side,
    "latent_shape": (side // step, side // step, config.latent_channels),
    "scaling": dataclasses.asdict(config.scaling),
    "vae_sha256": weights_sha256(config, params),
    "encoder_sha256": encoder_sha256(config, params),
    "compute_dtype": config.dtype,
    "images": source.fingerprint,
    "class_names": source.class_names,
    "shard_size": shard_size,
  }
  items = packed.shard_items(len(source), shard_size)
  writer = ShardWriter(out, packed.LATENTS, len(items), settings)
  params = jax.device_put(params, replicated(mesh))

  def read(place: int) -> _Image:
    example = source[place]
    pixels = center_crop(example["image"], (side, side))
    return source.name(place), int(example["label"]), pixels

  def encode(images: list[_Image]) -> jax.Array:
    pixels = np.stack([pixels for *_, pixels in images])
    padding = [(0, batch_size - len(images)), *((0, 0),) * 3]
    pixels = np.pad(pixels, padding)  # one size, one compilation
    return _moments(VAE(config), params, shard_batch(pixels, mesh))

  places = [place for shard in writer.todo() for place in items[shard]]
  images = packed.read_ahead(read, places, 2 * batch_size, bad_images)
  bar = tqdm.tqdm(total=len(places), unit="image", disable=None)
  with bar, use_mesh(mesh):
    for shard in writer.todo():
      of_shard = itertools.islice(images, len(items[shard]))
      with writer.open(shard) as target:
        previous: tuple = ((), ())  # added while the devices encode the next
        while batch := list(itertools.islice(of_shard, batch_size)):
          good = [image for image in batch if not isinstance(image, str)]
          for problem in batch:
            if isinstance(problem, str):
              target.skip(problem)
          encoded = (good, encode(good)) if good else ((), ())
          _add(target, *previous)
          previous = encoded
          bar.update(len(batch))
        _add(target, *previous)
  return writer.finish(**notes)


_Image = tuple[str, int, np.ndarray]  # name, label and pixels


@functools.partial(jax.jit, static_argnums=0)
def _moments(autoencoder: VAE, params: Any, images: jax.Array) -> jax.Array:
  """Moments of uint8 images and their mirror images.

  Args:
    autoencoder: the network.
    params: its parameters.
    images: [B, X, Y, channels].

  Returns:
    [B, 2, 2, x, y, channels] float32: view, mean and log variance.
  """
  x = images.astype(jnp.float32) / 127.5 - 1
  moments = [
    jnp.stack(autoencoder.apply({"params": params}, view, method="encode"), 1)
    for view in (x, x[:, :, ::-1])
  ]
  return jnp.stack(moments, 1).astype(jnp.float32)


def _add(target: OpenShard, images: Sequence[_Image], moments: Any) -> None:
  for (name, label, _), values in zip(images, np.asarray(moments)):
    try:
      payload = packed.encode_moments(values)
    except ValueError as error:
      raise ValueError(f"{name}: {error}") from error
    target.add({"label": label, "name": name}, payload)
