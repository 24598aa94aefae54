"""NaN and loss spikes: which steps are bad, and where a run goes back to."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.config import RewindConfig

_MEAN_STEPS = 50  # of the loss that a spike is compared with


class NonFiniteLossError(RuntimeError):
  """The loss or the gradient norm is NaN, infinite or a spike."""


class BadStepError(Exception):
  """A step whose result is not to be kept.

  Attributes:
    step: its number.
    position: training batches read, its own among them.
    reason: what is wrong with it.
  """

  def __init__(self, step: int, position: int, reason: str):
    super().__init__(f"{reason} at step {step}")
    self.step, self.position, self.reason = step, position, reason


class Watch:
  """Finds bad steps, and counts how often a run went back.

  All it knows is in checkpoints, so a resumed run decides as one that was never
  interrupted. With several processes all see the same metrics.

  Attributes:
    config: section `train.rewind` of the config.
    rewinds: how often the run went back.
  """

  def __init__(self, config: RewindConfig):
    """Knows nothing yet."""
    self.config = config
    self._mean: float | None = None
    self.rewinds = 0

  def check(
    self, step: int, position: int, values: Mapping[str, float]
  ) -> None:
    """Looks at the metrics of the next step.

    Args:
      step: its number.
      position: training batches read until then, its own among them.
      values: its metrics, with "loss" and "grad_norm".

    Raises:
      BadStepError: they are not finite, or the loss is a spike.
    """
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise BadStepError(step, position, f"{name}={values[name]}")
    loss, spike = values["loss"], self.config.spike
    if self._mean is None:
      self._mean = loss
    if spike and loss > spike * self._mean:
      reason = f"loss={loss:.4g}, the mean before is {self._mean:.4g},"
      raise BadStepError(step, position, reason)
    self._mean += (loss - self._mean) / _MEAN_STEPS

  def may_rewind(self) -> bool:
    """Whether the run may go back once more."""
    return bool(self.config.steps) and self.rewinds < self.config.limit

  def target(self, step: int, saved: Sequence[int]) -> int:
    """The checkpoint to go back to from a bad step.

    Args:
      step: the bad step.
      saved: steps of the checkpoints, ascending.

    Returns:
      The newest that is far enough back, else the oldest; -1 without any.
    """
    far = [s for s in saved if s <= step - self.config.steps]
    return far[-1] if far else min(saved, default=-1)

  def to_json(self) -> dict[str, Any]:
    """What a checkpoint is to hold."""
    return {"rewinds": self.rewinds, "mean_loss": self._mean}

  def restore(self, stored: Mapping[str, Any] | None) -> None:
    """Continues from a checkpoint, which may know of fewer rewinds.

    Args:
      stored: what `to_json` returned; None at the beginning of the run, and in
        checkpoints of older versions.
    """
    stored = stored or {}
    self._mean = stored.get("mean_loss")
    self.rewinds = max(stored.get("rewinds", 0), self.rewinds)
