"""Sizes of the autoencoder whose latents a diffusion model works on."""

import dataclasses
import math
from typing import Any

from moh_jax.config.checks import (
  DTYPES,
  MOST_NUMBER,
  MOST_WIDTH,
  above,
  at_least,
  at_most,
  in_range,
  one_of,
)


@dataclasses.dataclass(frozen=True)
class LatentScaling:
  """How latents become the input of a diffusion model, of about unit variance.

  The input is ((latents - mean) / std - shift) * scale. The defaults are those
  of Stable Diffusion 1 and 2.

  Attributes:
    scale: diffusers' `scaling_factor`.
    shift: diffusers' `shift_factor`.
    mean: of each channel, () is 0: diffusers' `latents_mean`.
    std: of each channel, () is 1: diffusers' `latents_std`.
  """

  scale: float = 0.18215
  shift: float = 0.0
  mean: tuple[float, ...] = ()
  std: tuple[float, ...] = ()

  def __post_init__(self):
    above("latents", 0, self, "scale", "std")
    in_range("latents", -MOST_NUMBER, MOST_NUMBER, self, "shift", "mean")

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
class VAEConfig:
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

  block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
  layers_per_block: int = 2
  image_channels: int = 3
  latent_channels: int = 4
  norm_groups: int = 32
  norm_eps: float = 1e-6
  use_quant_conv: bool = True
  use_post_quant_conv: bool = True
  mid_attention: bool = True
  scaling: LatentScaling = LatentScaling()
  dtype: str = "float32"

  def __post_init__(self):
    at_least("vae", 1, self, "layers_per_block", most=64)
    sizes = ("norm_groups", "image_channels", "latent_channels")
    at_least("vae", 1, self, *sizes, most=MOST_WIDTH)
    at_most("vae", MOST_WIDTH, self, "block_out_channels")
    in_range("vae", 1e-12, 1, self, "norm_eps")
    one_of("vae", self, dtype=DTYPES)
    self.scaling.check_channels(self.latent_channels)
    widths = self.block_out_channels
    if not widths or any(w < 1 or w % self.norm_groups for w in widths):
      raise ValueError(
        f"vae.block_out_channels={widths} must be multiples of "
        f"vae.norm_groups={self.norm_groups}, at least one"
      )

  @property
  def downscale(self) -> int:
    """Side of an image over the side of its latents."""
    return 2 ** (len(self.block_out_channels) - 1)
