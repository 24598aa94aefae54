"""Sizes of the autoencoder whose latents a diffusion model works on."""

import dataclasses
import math
from typing import Annotated, Any, Literal

from moh_jax.config import base


@dataclasses.dataclass(frozen=True)
class LatentScaling(base.Section):
  """How latents become the input of a diffusion model, of about unit variance.

  The input is ((latents - mean) / std - shift) * scale. The defaults are those
  of Stable Diffusion 1 and 2.

  Attributes:
    scale: diffusers' `scaling_factor`.
    shift: diffusers' `shift_factor`.
    mean: of each channel, () is 0: diffusers' `latents_mean`.
    std: of each channel, () is 1: diffusers' `latents_std`.
  """

  NAME = "latents"

  scale: base.Positive = 0.18215
  shift: base.Number = 0.0
  mean: tuple[base.Number, ...] = ()
  std: tuple[base.Positive, ...] = ()

  def affine(self, channels: int) -> tuple[list[float], list[float]]:
    """Offset and factor: the input is (latents - offset) * factor.

    Args:
      channels: of the latents.
    """
    mean, std = self.mean or (0.0,) * channels, self.std or (1.0,) * channels
    offset = [m + self.shift * s for m, s in zip(mean, std)]
    return offset, [self.scale / s for s in std]

  def check_channels(self, channels: int) -> None:
    """Raises ValueError unless `mean` and `std` have a value per channel."""
    for name in ("mean", "std"):
      value = getattr(self, name)
      if value and len(value) != channels:
        raise ValueError(
          f"latent {name}={value} must have {channels} values, one per channel"
        )

  def differences(self, other: "LatentScaling") -> list[str]:
    """Names the fields that differ, as "scale 0.18215, not 0.13025"."""
    ours, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
    return [
      f"{name} {ours[name]}, not {theirs[name]}"
      for name in ours
      if not _close(ours[name], theirs[name])
    ]


def _close(one: Any, other: Any) -> bool:
  """Whether numbers are equal but for the rounding to float32."""
  if isinstance(one, float) and isinstance(other, float):
    return math.isclose(one, other, rel_tol=1e-6)
  return len(one) == len(other) and all(map(_close, one, other))


@dataclasses.dataclass(frozen=True)
class VAEConfig(base.Section):
  """Convolutional autoencoder of Stable Diffusion (arXiv:2112.10752).

  The defaults are the public sizes (diffusers' AutoencoderKL).

  Attributes:
    block_out_channels: width of each resolution, the full one first; each
      further one halves the sides.
    layers_per_block: residual blocks of each resolution in the encoder; the
      decoder has one more.
    image_channels: channels of the images.
    latent_channels: channels of the latents.
    norm_groups: groups of every GroupNorm.
    norm_eps: epsilon of every GroupNorm.
    use_quant_conv: whether a 1x1 convolution ends the encoder.
    use_post_quant_conv: whether a 1x1 convolution begins the decoder.
    mid_attention: whether attention stands between the residual blocks at the
      lowest resolution.
    scaling: how diffusion models read its latents.
    dtype: compute dtype, "float32" or "bfloat16"; parameters, norms, softmax
      and results stay float32.
  """

  NAME = "vae"

  block_out_channels: tuple[base.Width, ...] = (128, 256, 512, 512)
  layers_per_block: Annotated[int, base.Range(1, 64)] = 2
  image_channels: base.Width = 3
  latent_channels: base.Width = 4
  norm_groups: base.Width = 32
  norm_eps: Annotated[float, base.Range(1e-12, 1, "[]")] = 1e-6
  use_quant_conv: bool = True
  use_post_quant_conv: bool = True
  mid_attention: bool = True
  scaling: LatentScaling = LatentScaling()
  dtype: base.Dtype = "float32"

  def check(self) -> None:
    """Groups divide the widths; the scaling has the channels of latents."""
    self.scaling.check_channels(self.latent_channels)
    widths = self.block_out_channels
    if not widths or any(width % self.norm_groups for width in widths):
      self.fail(
        "block_out_channels",
        f"must be multiples of vae.norm_groups={self.norm_groups}, at least "
        "one",
      )

  @property
  def downscale(self) -> int:
    """Side of an image over the side of its latents."""
    return 2 ** (len(self.block_out_channels) - 1)


@dataclasses.dataclass(frozen=True)
class EncodeOptions(base.Section):
  """How images become latents.

  Attributes:
    image_size: rows and columns of ADM's centre crop.
    latent_scale: noted for training, None is the autoencoder's; the stored
      moments are not scaled.
    batch_size: images that this process's devices encode at a time.
    shard_size: images of a shard.
    bad_images: "raise", or "skip": leave out what cannot be read or is smaller
      than `image_size`.
    threads: that read and crop.
  """

  NAME = "encode"

  image_size: base.Count = 256
  latent_scale: base.Positive | None = None
  batch_size: base.Count = 32
  shard_size: base.Count = 1024
  bad_images: Literal["raise", "skip"] = "raise"
  threads: base.Count = 8
