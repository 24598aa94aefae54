"""Drawing examples from a diffusion model."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import Config
from moh_jax.diffusion.guidance import guide
from moh_jax.diffusion.process import even_log_snr, make_process, respace
from moh_jax.diffusion.samplers import sample

_GAP = 2  # white pixels between the images of a grid

# (params, seed [], index [B], labels [B]) -> [B, X, Y, channels] float32.
Draw = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
# Latents [B, x, y, channels], unscaled, to images [B, X, Y, 3] in [-1, 1].
Decode = Callable[[jax.Array], jax.Array]


def make_draw(model: nn.Module, config: Config) -> Draw:
  """A function that draws examples as `config.sample` says.

  All noise of an example comes from the seed and the example's index: it is
  the same in any batch, on any number of devices and processes.

  Args:
    model: the network of `config.model`.
    config: of a diffusion model.

  Returns:
    A pure function, to be jitted.
  """
  options, diffusion = config.sample, config.diffusion
  training = make_process(diffusion.schedule, diffusion.steps)
  if options.method == "dpm" and options.steps.isdigit():
    process = even_log_snr(training, int(options.steps))
  else:
    process = respace(training, options.steps)
  low, high = options.cfg_interval
  last = int(process.timesteps[-1])
  everywhere = low <= process.timesteps[0] and last < high

  def draw(
    params: Any, seed: jax.Array, index: jax.Array, labels: jax.Array
  ) -> jax.Array:
    shape = config.model.input_shape
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(
      index
    )

    def noise(number: int | jax.Array) -> jax.Array:
      def one(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, number), shape)

      return jax.vmap(one)(keys)

    def network(x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
      out, _ = model.apply({"params": params}, x, t, labels)
      return out

    predict = guide(
      network,
      labels,
      config.model.num_classes,
      scale=options.cfg_scale,
      channels=options.cfg_channels,
      interval=None if everywhere else (low, high),
    )
    return sample(
      predict,
      noise(0),
      process,
      method=options.method,
      prediction=diffusion.prediction,
      noise=lambda step: noise(step + 1),
      clip=diffusion.space == "pixel",
    )

  return draw


def make_paint(
  model: nn.Module, config: Config, decode: Decode | None = None
) -> Draw:
  """As `make_draw`, but jitted and with pixels as its result.

  Args:
    model: the network of `config.model`.
    config: of a diffusion model.
    decode: of latents; models of pixels need none.

  Returns:
    (params, seed, index, labels) -> [B, X, Y, channels] uint8.

  Raises:
    ValueError: the model draws latents and nothing decodes them.
  """
  in_pixels = config.diffusion.space == "pixel"
  if not in_pixels and decode is None:
    raise ValueError(
      "diffusion.space='latent': an autoencoder must decode what the model "
      "draws (`decode`, --vae PATH)"
    )
  draw = jax.jit(make_draw(model, config))
  finish = jax.jit(to_pixels)

  def paint(*args: Any) -> jax.Array:
    x = draw(*args)
    # Its own program: the autoencoder's weights are arguments, not constants.
    x = x if in_pixels else decode(x / config.diffusion.latent_scale)
    return finish(x)

  return paint


def to_pixels(images: jax.Array) -> jax.Array:
  """Images in [-1, 1] to uint8, rounded."""
  scaled = jnp.clip((images + 1.0) * 127.5, 0.0, 255.0)
  return jnp.round(scaled).astype(jnp.uint8)


def image_grid(images: np.ndarray, columns: int) -> np.ndarray:
  """Lays images out row by row, with two white pixels between them.

  Args:
    images: [B, X, Y, channels] uint8.
    columns: images in a row.

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
