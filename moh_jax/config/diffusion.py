"""Sections of diffusion models: the process, and sampling from it."""

import dataclasses
from typing import ClassVar

from moh_jax.config.autoencoder import LatentScaling
from moh_jax.config.checks import (
  MOST_COUNT,
  above,
  at_least,
  at_most,
  in_range,
  one_of,
)

SPACES = ("latent", "pixel")
SCHEDULES = ("linear", "cosine")
PREDICTIONS = ("epsilon", "x0", "v")
LOSS_WEIGHTS = ("uniform", "min_snr")
METHODS = ("ddpm", "ddim", "dpm")
GUIDED_CHANNELS = ("three", "all")


@dataclasses.dataclass(frozen=True)
class DiffusionConfig:
  """The diffusion process and its training objective.

  Attributes:
    space: what the model reads and predicts: "latent" (latents of the Stable
      Diffusion autoencoder) or "pixel".
    latent_scale: factor that brings latents to about unit variance; None is
      that of the data, with the three that follow, or Stable Diffusion's.
    latent_shift: subtracted before, see `LatentScaling`.
    latent_mean: of each channel, () is 0.
    latent_std: of each channel, () is 1.
    schedule: noise levels of the steps: "linear" betas (arXiv:2006.11239) or
      "cosine" (arXiv:2102.09672).
    steps: timesteps of the training process, 21 to 100,000.
    prediction: what the network predicts: "epsilon" (the noise), "x0" (the
      clean example) or "v" (arXiv:2202.00512).
    loss_weight: weight of the squared error by timestep: "uniform", or
      "min_snr" (arXiv:2303.09556).
    snr_gamma: signal-to-noise ratio at which "min_snr" cuts.
    vb_weight: weight of the variational bound that trains a learned variance.
  """

  space: str = "latent"
  latent_scale: float | None = None
  latent_shift: float = 0.0
  latent_mean: tuple[float, ...] = ()
  latent_std: tuple[float, ...] = ()
  schedule: str = "linear"
  steps: int = 1000
  prediction: str = "epsilon"
  loss_weight: str = "uniform"
  snr_gamma: float = 5.0
  vb_weight: float = 1.0

  # Fields of the objective: a run may be continued with other values.
  RUNTIME_FIELDS = ("loss_weight", "snr_gamma", "vb_weight")

  def __post_init__(self):
    one_of("diffusion", self, space=SPACES, schedule=SCHEDULES)
    one_of("diffusion", self, prediction=PREDICTIONS, loss_weight=LOSS_WEIGHTS)
    # The linear betas scale with 1000 / steps and must stay below 1.
    in_range("diffusion", 21, 100_000, self, "steps")
    at_least("diffusion", 0, self, "vb_weight")
    above("diffusion", 0, self, "latent_scale", "latent_std", "snr_gamma")

  @property
  def scaling(self) -> LatentScaling:
    """How latents become the model's input."""
    scale = self.latent_scale
    return LatentScaling(
      LatentScaling.scale if scale is None else scale,
      self.latent_shift,
      self.latent_mean,
      self.latent_std,
    )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """How images are sampled: a run's grids, and defaults of `sample`.

  Attributes:
    every: optimizer steps between grids of samples; 0 writes none.
    num: images of a grid; their labels go through the classes in turn.
    method: sampler: "ddpm" (ancestral), "ddim" (arXiv:2010.02502) or "dpm"
      (DPM-Solver++ 2M, arXiv:2211.01095).
    steps: timesteps visited: "N" spread evenly ("dpm": evenly in the logarithm
      of the signal-to-noise ratio), "ddimN" at a fixed stride, or "N,M,..." for
      that many in each of equal sections.
    cfg_scale: strength of classifier-free guidance (arXiv:2207.12598), at least
      1; 1 is none.
    cfg_channels: channels that are guided: the first "three", as released, or
      "all".
    cfg_interval: (low, high): guidance acts on timesteps t with low <= t < high
      (arXiv:2404.07724).
  """

  every: int = 0
  num: int = 16
  method: str = "ddpm"
  steps: str = "250"
  cfg_scale: float = 1.5
  cfg_channels: str = "three"
  cfg_interval: tuple[int, int] = (0, 100_000)

  # A run may be continued with other values of all: they train nothing.
  RUNTIME_FIELDS = tuple(__annotations__)
  CHOICES: ClassVar = {"method": METHODS, "cfg_channels": GUIDED_CHANNELS}

  def __post_init__(self):
    at_least("sample", 0, self, "every")
    at_least("sample", 1, self, "num", "cfg_scale")
    at_most("sample", MOST_COUNT, self, "cfg_interval")
    one_of("sample", self, **self.CHOICES)
    interval = self.cfg_interval
    if len(interval) != 2 or not 0 <= interval[0] < interval[1]:
      raise ValueError(
        f"sample.cfg_interval={self.cfg_interval} must be (low, high) with "
        "0 <= low < high"
      )
