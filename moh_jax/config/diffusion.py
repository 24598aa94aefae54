"""Sections of diffusion models: the process, and sampling from it."""

import dataclasses
from typing import ClassVar

from moh_jax.config.autoencoder import LatentScaling
from moh_jax.config.checks import (
  MOST_COUNT,
  MOST_NUMBER,
  RESIZES,
  above,
  at_least,
  at_most,
  in_range,
  one_of,
)

SPACES = ("latent", "pixel")
FLOW = "flow"
SCHEDULES = ("linear", "cosine", FLOW)
PREDICTIONS = ("epsilon", "x0", "v", "velocity")
LOSS_WEIGHTS = ("uniform", "min_snr")
DIFFUSION_METHODS = ("ddpm", "ddim", "dpm")
FLOW_METHODS = ("euler", "heun")
METHODS = DIFFUSION_METHODS + FLOW_METHODS
MOST_FLOW_STEPS = 100_000
MOST_TIMESTEPS = 100_000  # of the training process
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
    schedule: noise levels of the steps: "linear" betas (arXiv:2006.11239),
      "cosine" (arXiv:2102.09672), or "flow", the straight path of flow matching
      (arXiv:2210.02747) as in SiT (arXiv:2401.08740).
    steps: timesteps of the training process, 21 to 100,000.
    prediction: what the network predicts: "epsilon" (the noise), "x0" (the
      clean example) or "v" (arXiv:2202.00512); "velocity" (noise minus clean
      example) for "flow", and for it alone.
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
  # Fields that parameters were trained for: another run cannot start from them
  # with others.
  NUMERIC_FIELDS = ("space", "schedule", "steps", "prediction")

  def __post_init__(self):
    one_of("diffusion", self, space=SPACES, schedule=SCHEDULES)
    one_of("diffusion", self, prediction=PREDICTIONS, loss_weight=LOSS_WEIGHTS)
    self._check_flow()
    # The linear betas scale with 1000 / steps and must stay below 1.
    in_range("diffusion", 21, MOST_TIMESTEPS, self, "steps")
    at_least("diffusion", 0, self, "vb_weight")
    above("diffusion", 0, self, "latent_scale", "latent_std", "snr_gamma")
    offsets = ("latent_shift", "latent_mean")
    in_range("diffusion", -MOST_NUMBER, MOST_NUMBER, self, *offsets)

  def _check_flow(self) -> None:
    is_flow = self.schedule == FLOW
    if is_flow != (self.prediction == "velocity"):
      raise ValueError(
        f"diffusion.schedule={self.schedule!r} and diffusion.prediction="
        f"{self.prediction!r} do not go together: 'flow' needs 'velocity', the "
        "others another one"
      )
    if is_flow and self.loss_weight != "uniform":
      raise ValueError(
        f"diffusion.loss_weight={self.loss_weight!r} must be 'uniform' for "
        "diffusion.schedule='flow'"
      )

  @property
  def methods(self) -> tuple[str, ...]:
    """Samplers of this process."""
    return FLOW_METHODS if self.schedule == FLOW else DIFFUSION_METHODS

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
    num: images of a grid.
    labels: of the grid's images in turn; -1 is no label. Empty goes through
      the classes.
    zoom: how often a pixel of the grid is repeated in each direction.
    method: sampler: "ddpm" (ancestral), "ddim" (arXiv:2010.02502) or "dpm"
      (DPM-Solver++ 2M, arXiv:2211.01095); for flow matching "euler" or "heun",
      which evaluates the network twice a step.
    steps: timesteps visited: "N" spread evenly ("dpm": evenly in the logarithm
      of the signal-to-noise ratio), "ddimN" at a fixed stride, or "N,M,..." for
      that many in each of equal sections; for flow matching "N".
    eta: noise that "ddim" adds, as a part of what the ancestral sampler adds:
      0, none, to 1.
    cfg_scale: strength of classifier-free guidance (arXiv:2207.12598); 1 is
      none, 0 samples without labels.
    cfg_channels: channels that are guided: the first "three", as released, or
      "all".
    cfg_interval: (low, high): guidance acts on timesteps t with low <= t < high
      (arXiv:2404.07724); a high of 100,000 or more has no upper end.
    fid_images: images that each evaluation samples for the metric "fid", of all
      classes in turn; 0 leaves it out.
    fid_reference: npz file of statistics of real images, as `fid --save-stats`
      writes it, or of ADM or pytorch-fid.
    fid_inception: weights of the Inception network, as for `fid --inception`.
    fid_resize: to 299 pixels, as `fid --resize`: "tf1" or "ptfid".
  """

  every: int = 0
  num: int = 16
  labels: tuple[int, ...] = ()
  zoom: int = 1
  method: str = "ddpm"
  steps: str = "250"
  eta: float = 0.0
  cfg_scale: float = 1.5
  cfg_channels: str = "three"
  cfg_interval: tuple[int, int] = (0, MOST_TIMESTEPS)
  fid_images: int = 0
  fid_reference: str = ""
  fid_inception: str = ""
  fid_resize: str = "tf1"

  # A run may be continued with other values of all: they train nothing.
  RUNTIME_FIELDS = tuple(__annotations__)
  CHOICES: ClassVar = {
    "method": METHODS,
    "cfg_channels": GUIDED_CHANNELS,
    "fid_resize": RESIZES,
  }

  def __post_init__(self):
    at_least("sample", 0, self, "every")
    at_least("sample", 1, self, "num")
    at_least("sample", -1, self, "labels")
    in_range("sample", 1, 64, self, "zoom")
    at_least("sample", 0, self, "cfg_scale")
    in_range("sample", 0, 1, self, "eta")
    at_most("sample", MOST_COUNT, self, "cfg_interval")
    one_of("sample", self, **self.CHOICES)
    at_least("sample", 0, self, "fid_images")
    if self.fid_images == 1:
      raise ValueError(
        "sample.fid_images=1 must be 0, or at least 2 for a covariance"
      )
    for name in ("fid_reference", "fid_inception"):
      if self.fid_images and not getattr(self, name):
        raise ValueError(
          f"sample.{name}='' must name a file where sample.fid_images is not 0"
        )
    interval = self.cfg_interval
    if len(interval) != 2 or not 0 <= interval[0] < interval[1]:
      raise ValueError(
        f"sample.cfg_interval={self.cfg_interval} must be (low, high) with "
        "0 <= low < high"
      )
