"""Sizes of the autoencoder whose latents a diffusion model works on."""

import dataclasses

from moh_jax.config.checks import (
  DTYPES,
  MOST_WIDTH,
  at_least,
  at_most,
  in_range,
  one_of,
)


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
  dtype: str = "float32"

  def __post_init__(self):
    at_least("vae", 1, self, "layers_per_block", most=64)
    sizes = ("norm_groups", "image_channels", "latent_channels")
    at_least("vae", 1, self, *sizes, most=MOST_WIDTH)
    at_most("vae", MOST_WIDTH, self, "block_out_channels")
    in_range("vae", 1e-12, 1, self, "norm_eps")
    one_of("vae", self, dtype=DTYPES)
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
