"""The section of image classifiers: how training targets are made."""

import dataclasses

from moh_jax.config.checks import at_least, in_range


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
  """Label smoothing (arXiv:1512.00567) and the mixing of whole images.

  Attributes:
    label_smoothing: share of the target that is spread over all classes, in
      [0, 1]; 0 is off.
    mixup: alpha of the Beta distribution of mixup (arXiv:1710.09412), which
      blends two images; 0 is off.
    cutmix: alpha of the Beta distribution of CutMix (arXiv:1905.04899), which
      pastes a box of one image into another; 0 is off.
    cutmix_prob: probability of CutMix rather than mixup for a batch where both
      are on, in [0, 1].
  """

  label_smoothing: float = 0.0
  mixup: float = 0.0
  cutmix: float = 0.0
  cutmix_prob: float = 0.5

  # A run may be continued with other values of these.
  RUNTIME_FIELDS = ("label_smoothing", "mixup", "cutmix", "cutmix_prob")

  @property
  def mixes(self) -> bool:
    """Whether images are mixed."""
    return bool(self.mixup or self.cutmix)

  def __post_init__(self):
    at_least("classifier", 0, self, "mixup", "cutmix")
    in_range("classifier", 0, 1, self, "cutmix_prob", "label_smoothing")
