"""Options of sampling texts and of encoding images; importable without JAX."""

import dataclasses
from typing import ClassVar

from moh_jax.config.checks import at_least, one_of


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are sampled.

  Attributes:
    max_new_tokens: tokens written at most.
    temperature: of the distribution; 0 always takes the best token.
    top_k: sample from so many best tokens; 0: from all.
    top_p: sample from the fewest best tokens that have this probability.
    stop: texts that end what is written; they are left out of it.
    seed: of the samples; those of prompt i do not depend on the other prompts.
  """

  max_new_tokens: int = 64
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  stop: tuple[str, ...] = ()
  seed: int = 0

  def __post_init__(self):
    for name, low in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0)):
      value = getattr(self, name)
      if not low <= value < float("inf"):
        raise ValueError(f"{name}={value} must be at least {low}")
    if self.top_k >= 2**31:
      raise ValueError(f"top_k={self.top_k} must be below {2**31}")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p={self.top_p} must be in (0, 1]")
    if "" in self.stop:
      raise ValueError("stop='' must not be empty")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed={self.seed} must be in [0, {2**32 - 1}]")

  @property
  def greedy(self) -> bool:
    """Whether the best token is always taken."""
    return self.temperature == 0

  @property
  def cut(self) -> bool:
    """Whether only some tokens may be sampled."""
    return bool(self.top_k) or self.top_p < 1


@dataclasses.dataclass(frozen=True)
class EncodeOptions:
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

  image_size: int = 256
  latent_scale: float | None = None
  batch_size: int = 32
  shard_size: int = 1024
  bad_images: str = "raise"
  threads: int = 8

  CHOICES: ClassVar = {"bad_images": ("raise", "skip")}

  def __post_init__(self):
    at_least("encode", 1, self, "image_size", "batch_size", "shard_size")
    at_least("encode", 1, self, "threads")
    scale = self.latent_scale
    if scale is not None and not 0 < scale < float("inf"):
      raise ValueError(f"latent_scale={scale} must be above 0")
    one_of("encode", self, **self.CHOICES)
