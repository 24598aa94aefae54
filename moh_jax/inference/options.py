"""Options of sampling texts and of encoding images; importable without JAX."""

import dataclasses
from typing import Annotated, Literal

from moh_jax.config.base import Amount, Count, Natural, Positive, Range, Section


@dataclasses.dataclass(frozen=True)
class Sampling(Section):
  """How tokens are sampled.

  Attributes:
    max_new_tokens: tokens written at most.
    temperature: of the distribution; 0 always takes the best token.
    top_k: sample from so many best tokens; 0: from all.
    top_p: sample from the fewest best tokens that have this probability.
    stop: texts that end what is written; they are left out of it.
    seed: of the samples; those of prompt i do not depend on the other prompts.
  """

  NAME = ""

  max_new_tokens: Count = 64
  temperature: Amount = 0.0
  top_k: Natural = 0
  top_p: Annotated[float, Range(0, 1, "(]")] = 1.0
  stop: tuple[str, ...] = ()
  seed: Annotated[int, Range(0, 2**32 - 1, "[]")] = 0

  def check(self) -> None:
    """Texts that end something have characters."""
    if "" in self.stop:
      raise ValueError("stop='' must not be empty")

  @property
  def greedy(self) -> bool:
    """Whether the best token is always taken."""
    return self.temperature == 0

  @property
  def cut(self) -> bool:
    """Whether only some tokens may be sampled."""
    return bool(self.top_k) or self.top_p < 1


@dataclasses.dataclass(frozen=True)
class EncodeOptions(Section):
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

  image_size: Count = 256
  latent_scale: Positive | None = None
  batch_size: Count = 32
  shard_size: Count = 1024
  bad_images: Literal["raise", "skip"] = "raise"
  threads: Count = 8
