"""Sampling examples from a diffusion model."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import Config
from moh_jax.config.dit import FLOW
from moh_jax.models.diffusion import (
  AnyProcess,
  even_log_snr,
  even_times,
  make_process,
  respace,
)
from moh_jax.models.samplers import guide, sample
from moh_jax.models.time_heads import with_active_heads
from moh_jax.runtime.parameters import check_finite

_GAP = 2  # white pixels between the images of a grid

# (params, seed [], index [B], labels [B]) -> examples [B, X, Y, channels].
SampleFn = Callable[..., jax.Array]
# Latents [B, x, y, channels], unscaled, to images [B, X, Y, 3] in [-1, 1].
Decode = Callable[[jax.Array], jax.Array]


def make_sampler(model: nn.Module, config: Config) -> SampleFn:
  """Makes a function that samples examples with the options `config.sample`.

  All noise of an example comes from the seed and the example's index. So it is
  the same in any batch, on any number of devices and processes.

  Args:
    model: the network of `config.model`.
    config: config of a diffusion model.

  Returns:
    (params, seed, index, labels) -> [B, X, Y, channels] float32, not yet
    jitted.
  """
  options, diffusion = config.sample, config.diffusion
  process = _sampling_process(config)

  def run(
    params: Any, seed: jax.Array, index: jax.Array, labels: jax.Array
  ) -> jax.Array:
    shape = config.model.input_shape
    fold = jax.random.fold_in
    keys = jax.vmap(lambda i: fold(jax.random.key(seed), i))(index)

    def draw(number: int | jax.Array) -> jax.Array:
      return jax.vmap(lambda k: jax.random.normal(fold(k, number), shape))(keys)

    def whole(x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
      out, _ = model.apply({"params": params}, x, t, labels)
      return out

    network, router = whole, config.model.router
    if router.reads_time and not router.varies:
      network = with_active_heads(model, params, process.timesteps)
    predict = guide(
      network,
      labels,
      config.model.num_classes,
      scale=options.cfg_scale,
      channels=options.cfg_channels,
    )
    return sample(
      predict,
      draw(0),
      process,
      method=options.method,
      prediction=diffusion.prediction,
      noise=lambda step: draw(step + 1),
      eta=options.eta,
      clip=diffusion.space == "pixel",
    )

  return run


def _sampling_process(config: Config) -> AnyProcess:
  """The steps that a sampler takes."""
  options, diffusion = config.sample, config.diffusion
  if diffusion.schedule == FLOW:
    return even_times(int(options.steps), diffusion.steps)
  training = make_process(diffusion.schedule, diffusion.steps)
  if options.method == "dpm" and options.steps.isdigit():
    return even_log_snr(training, int(options.steps))
  return respace(training, options.steps)


def make_image_sampler(
  model: nn.Module,
  config: Config,
  decode: Decode | None = None,
) -> SampleFn:
  """Makes a jitted function that samples images as pixels.

  Args:
    model: the network of `config.model`.
    config: config of a diffusion model.
    decode: decoder of latents; models of pixels need none.

  Returns:
    (params, seed, index, labels) -> [B, X, Y, channels] uint8, see
    `make_sampler`; raises FloatingPointError where they are not finite.

  Raises:
    ValueError: the model samples latents and `decode` is missing.
  """
  in_pixels = config.diffusion.space == "pixel"
  if not in_pixels and decode is None:
    raise ValueError(
      "diffusion.space='latent': an autoencoder must decode what the model "
      "samples (`decode`, --vae PATH); a run with sample.every=0 needs none"
    )
  parts = config.diffusion.scaling.affine(config.model.channels)
  offset, factor = (np.float32(part)[None, None, None] for part in parts)
  sample_fn = jax.jit(make_sampler(model, config))
  finish = jax.jit(to_pixels)

  def sample_images(*args: Any) -> jax.Array:
    x = sample_fn(*args)
    # Not part of the jitted programs: its weights would become constants there.
    x = x if in_pixels else decode(x / factor + offset)
    check_finite(x, "the images that the model makes")
    return finish(x)

  return sample_images


def to_pixels(images: jax.Array) -> jax.Array:
  """Images in [-1, 1] to uint8, rounded."""
  scaled = jnp.clip((images + 1.0) * 127.5, 0.0, 255.0)
  return jnp.round(scaled).astype(jnp.uint8)


def image_grid(images: np.ndarray, columns: int) -> np.ndarray:
  """Arranges images in a grid row by row, with two white pixels between them.

  Args:
    images: [B, X, Y, channels] uint8.
    columns: images per row.

  Returns:
    [rows, columns, channels] uint8.
  """
  batch, height, width, channels = images.shape
  rows = -(-batch // columns)
  blank = np.full((rows * columns - batch, *images.shape[1:]), 255, np.uint8)
  padded = np.pad(
    np.concatenate([images, blank]),
    ((0, 0), (0, _GAP), (0, _GAP), (0, 0)),
    constant_values=255,
  )
  height, width = height + _GAP, width + _GAP
  tiles = padded.reshape(rows, columns, height, width, channels)
  grid = tiles.swapaxes(1, 2).reshape(rows * height, columns * width, channels)
  return grid[:-_GAP, :-_GAP]
