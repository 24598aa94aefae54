"""The autoencoder of Stable Diffusion (arXiv:2112.10752), without its training.

It encodes images to the latents that a diffusion model works on, and decodes
latents to images.
"""

import dataclasses
import hashlib
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moh_jax.config.dit import VAEConfig
from moh_jax.layers.mlp import check_shape
from moh_jax.layers.partitioning import constrain
from moh_jax.ops.attention import attention

# What decides which latents an image has; decoders may differ.
_ENCODER = ("encoder", "quant_conv")
_LOGVAR_RANGE = (-30.0, 20.0)


class ResidualBlock(nn.Module):
  """Two normalized 3x3 convolutions beside a shortcut.

  Attributes:
    config: config of the autoencoder.
    features: channels of the output. If the input has another number, the
      shortcut is a 1x1 convolution.
  """

  config: VAEConfig
  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, C] to [B, X, Y, features]."""
    cfg = self.config
    y = nn.silu(_norm(cfg, "norm1", x))
    y = _conv(cfg, self.features, "conv1")(y)
    y = nn.silu(_norm(cfg, "norm2", y))
    y = _conv(cfg, self.features, "conv2")(y)
    if x.shape[-1] != self.features:
      x = _conv(cfg, self.features, "shortcut", 1)(x)
    return x + y


class PixelAttention(nn.Module):
  """Attention of one head among all positions, added to its input.

  Attributes:
    config: config of the autoencoder.
  """

  config: VAEConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, C] to the same shape."""
    dtype = jnp.dtype(self.config.dtype)
    batch, rows, columns, channels = x.shape
    tokens = _norm(self.config, "norm", x)
    tokens = tokens.reshape(batch, rows * columns, 1, channels)
    q, k, v = (
      nn.Dense(channels, dtype=dtype, name=name)(tokens)
      for name in ("query", "key", "value")
    )
    heads = attention(q, k, v, implementation="dense")
    out = nn.Dense(channels, dtype=dtype, name="out")(heads)
    return x + out.reshape(x.shape)


class MidBlock(nn.Module):
  """Residual block, attention if the config has it, residual block.

  Attributes:
    config: config of the autoencoder.
  """

  config: VAEConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, C] to the same shape."""
    features = x.shape[-1]
    x = ResidualBlock(self.config, features, name="resnet0")(x)
    if self.config.mid_attention:
      x = PixelAttention(self.config, name="attn")(x)
    return ResidualBlock(self.config, features, name="resnet1")(x)


class Encoder(nn.Module):
  """Maps pixels to the latents' moments, before the final 1x1 convolution.

  Attributes:
    config: config of the autoencoder.
  """

  config: VAEConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, X, Y, channels] to [B, x, y, 2 * latent_channels]."""
    cfg = self.config
    widths = cfg.block_out_channels
    x = _conv(cfg, widths[0], "conv_in")(x)
    for level, width in enumerate(widths):
      for layer in range(cfg.layers_per_block):
        x = ResidualBlock(cfg, width, name=f"down{level}_resnet{layer}")(x)
      if level + 1 < len(widths):
        x = _conv(cfg, width, f"down{level}_conv", stride=2)(x)
    x = MidBlock(cfg, name="mid")(x)
    x = nn.silu(_norm(cfg, "norm_out", x))
    return _conv(cfg, 2 * cfg.latent_channels, "conv_out")(x)


class Decoder(nn.Module):
  """Maps latents, after the first 1x1 convolution, to pixels.

  Attributes:
    config: config of the autoencoder.
  """

  config: VAEConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, x, y, latent_channels] to [B, X, Y, channels]."""
    cfg = self.config
    widths = cfg.block_out_channels[::-1]
    x = _conv(cfg, widths[0], "conv_in")(x)
    x = MidBlock(cfg, name="mid")(x)
    for level, width in enumerate(widths):
      for layer in range(cfg.layers_per_block + 1):
        x = ResidualBlock(cfg, width, name=f"up{level}_resnet{layer}")(x)
      if level + 1 < len(widths):
        x = x.repeat(2, axis=1).repeat(2, axis=2)
        x = _conv(cfg, width, f"up{level}_conv")(x)
    x = nn.silu(_norm(cfg, "norm_out", x))
    return _conv(cfg, cfg.image_channels, "conv_out")(x)


class VAE(nn.Module):
  """The autoencoder; call `apply` with `method="encode"` or `"decode"`.

  Its parameters have no logical axes, so every device holds all of them.

  Attributes:
    config: config of the autoencoder.
  """

  config: VAEConfig

  def setup(self):
    """Creates the submodules that `encode` and `decode` share."""
    cfg = self.config
    self.encoder = Encoder(cfg)
    self.decoder = Decoder(cfg)
    if cfg.use_quant_conv:
      self.quant_conv = _conv(cfg, 2 * cfg.latent_channels, None, 1)
    if cfg.use_post_quant_conv:
      self.post_quant_conv = _conv(cfg, cfg.latent_channels, None, 1)

  def __call__(self, images: jax.Array) -> jax.Array:
    """Reconstructs images [B, X, Y, channels] from their latents' means."""
    mean, _ = self.encode(images)
    return self.decode(mean)

  def encode(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes images to a Gaussian for every latent.

    Args:
      images: [B, X, Y, channels] in [-1, 1], X and Y multiples of the config's
        `downscale`.

    Returns:
      Mean and log variance, [B, x, y, latent_channels] float32, not scaled: a
      diffusion model multiplies sampled latents by its `latent_scale`.

    Raises:
      ValueError: images of another shape.
    """
    cfg = self.config
    step, sides = cfg.downscale, images.shape[1:3]
    whole = (step * max(side // step, 1) for side in sides)
    check_shape("images", images, (*whole, cfg.image_channels))
    x = images.astype(jnp.dtype(cfg.dtype))
    x = self.encoder(constrain(x, "batch", None, None, None))
    if cfg.use_quant_conv:
      x = self.quant_conv(x)
    mean, logvar = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return mean, jnp.clip(logvar, *_LOGVAR_RANGE)

  def decode(self, latents: jax.Array) -> jax.Array:
    """Decodes latents to images.

    Args:
      latents: [B, x, y, latent_channels], not scaled.

    Returns:
      [B, X, Y, channels] float32, mostly in [-1, 1], not clamped.

    Raises:
      ValueError: latents of another shape.
    """
    cfg = self.config
    shape = (*latents.shape[1:3], cfg.latent_channels)
    check_shape("latents", latents, shape)
    x = latents.astype(jnp.dtype(cfg.dtype))
    x = constrain(x, "batch", None, None, None)
    if cfg.use_post_quant_conv:
      x = self.post_quant_conv(x)
    return self.decoder(x).astype(jnp.float32)


def _conv(
  config: VAEConfig,
  features: int,
  name: str | None,
  size: int = 3,
  stride: int = 1,
) -> nn.Conv:
  """Makes a convolution that keeps the size, or with stride 2 halves it."""
  half = size // 2
  # Halving pads only at the bottom and the right.
  pads = (half, half) if stride == 1 else (0, 1)
  return nn.Conv(
    features,
    (size, size),
    strides=stride,
    padding=(pads, pads),
    dtype=jnp.dtype(config.dtype),
    name=name,
  )


def _norm(config: VAEConfig, name: str, x: jax.Array) -> jax.Array:
  """GroupNorm of [B, X, Y, C] in float32, like the activation after it."""
  return nn.GroupNorm(
    num_groups=config.norm_groups,
    epsilon=config.norm_eps,
    use_fast_variance=False,
    dtype=jnp.float32,
    name=name,
  )(x)


def weights_sha256(config: VAEConfig, params: Any) -> str:
  """Hash of an autoencoder.

  Args:
    config: its sizes; how it computes, and how its latents are scaled later,
      do not count.
    params: its parameters.
  """
  sizes = dataclasses.asdict(dataclasses.replace(config, dtype="float32"))
  del sizes["scaling"]
  digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
  flat = traverse_util.flatten_dict(params, sep="/")
  for name in sorted(flat):
    array = np.asarray(flat[name], np.float32)
    digest.update(f"{name} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def encoder_sha256(config: VAEConfig, params: Any) -> str:
  """Hash of an autoencoder's encoder.

  Autoencoders that share it differ only in how they decode latents.

  Args:
    config: sizes of the autoencoder.
    params: its parameters.
  """
  part = {name: params[name] for name in _ENCODER if name in params}
  return weights_sha256(config, part)
