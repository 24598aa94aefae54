"""Mean and covariance of features, batch by batch, in float64."""

from typing import NamedTuple

import numpy as np


class Gaussian(NamedTuple):
  """A normal distribution.

  Attributes:
    mean: [D] float64.
    covariance: [D, D] float64, symmetric.
  """

  mean: np.ndarray
  covariance: np.ndarray


class Moments(NamedTuple):
  """Sums over samples seen so far.

  Attributes:
    count: samples.
    mean: [D] float64.
    scatter: [D, D] float64, sum of the outer products of centred samples.
  """

  count: int
  mean: np.ndarray
  scatter: np.ndarray

  def gaussian(self) -> Gaussian:
    """Mean and sample covariance (divided by count - 1).

    Raises:
      ValueError: fewer than two samples, or features that are not finite.
    """
    if self.count < 2:
      raise ValueError(
        f"a covariance needs at least 2 samples, there are {self.count}"
      )
    if not np.isfinite(self.scatter).all():
      raise ValueError("features must be finite; some are NaN or infinite")
    return Gaussian(self.mean, self.scatter / (self.count - 1))


def moments(features: np.ndarray) -> Moments:
  """Moments of one batch.

  Args:
    features: [N, D] of any float type, N at least 1.

  Raises:
    ValueError: no samples, or another rank.
  """
  if features.ndim != 2 or not len(features):
    raise ValueError(
      f"features of shape {features.shape} must be [samples, dim], not empty"
    )
  features = features.astype(np.float64)
  mean = features.mean(0)
  centred = features - mean
  return Moments(len(features), mean, centred.T @ centred)


def merge(first: Moments, second: Moments) -> Moments:
  """Moments of two sets of samples together.

  The pairwise update of Chan, Golub and LeVeque (1979) keeps sums centred, so
  that nothing cancels however large the mean is.
  """
  count = first.count + second.count
  shift = second.mean - first.mean
  between = first.count * second.count / count
  return Moments(
    count,
    first.mean + shift * (second.count / count),
    first.scatter + second.scatter + between * np.outer(shift, shift),
  )
