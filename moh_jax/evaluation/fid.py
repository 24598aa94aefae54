"""Frechet distance (arXiv:1706.08500) and Inception Score (arXiv:1606.03498).

NumPy in float64, as openai/guided-diffusion's evaluations/evaluator.py defines
them; float32 covariances would cost up to 1e-3 of a distance.
"""

from typing import NamedTuple

import numpy as np

from moh_jax.evaluation.statistics import Gaussian

INCEPTION_BLOCK = 5000  # samples per block of the published scores


class FrechetTerms(NamedTuple):
  """The terms of a Frechet distance.

  Attributes:
    mean: squared distance of the means.
    trace_a: trace of the first covariance.
    trace_b: trace of the second.
    trace_root: trace of the root of their product.
  """

  mean: float
  trace_a: float
  trace_b: float
  trace_root: float

  @property
  def distance(self) -> float:
    """The distance; rounding may leave a tiny negative number for 0."""
    return self.mean + self.trace_a + self.trace_b - 2 * self.trace_root


def frechet_terms(a: Gaussian, b: Gaussian) -> FrechetTerms:
  """Frechet distance of two normal distributions.

  With factors S = F F^T from eigenvalues, the trace of (S_a S_b)^(1/2) is the
  sum of the singular values of F_a^T F_b. Singular covariances (fewer samples
  than dimensions) are no special case, so nothing is added to a diagonal.

  Args:
    a: of the generated images.
    b: of the reference.

  Raises:
    ValueError: the dimensions differ, or a value is not finite.
  """
  dim = a.mean.size
  for which, g in (("first", a), ("second", b)):
    if g.mean.shape != (dim,) or g.covariance.shape != (dim, dim):
      raise ValueError(
        f"the {which} distribution has mean {g.mean.shape} and covariance "
        f"{g.covariance.shape}; both must have {dim} dimensions"
      )
    if not (np.isfinite(g.mean).all() and np.isfinite(g.covariance).all()):
      raise ValueError(f"the {which} distribution holds NaN or infinity")
  product = _factor(a.covariance).T @ _factor(b.covariance)
  roots = np.linalg.svd(product, compute_uv=False) if product.size else 0.0
  shift = a.mean.astype(np.float64) - b.mean.astype(np.float64)
  return FrechetTerms(
    float(shift @ shift),
    float(np.trace(a.covariance, dtype=np.float64)),
    float(np.trace(b.covariance, dtype=np.float64)),
    float(np.sum(roots)),
  )


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
  """`frechet_terms`, summed."""
  return frechet_terms(a, b).distance


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Log-probabilities [N, classes] float64; finite for finite logits."""
  logits = logits.astype(np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def block_score(logits: np.ndarray) -> float:
  """Inception Score of one block.

  Args:
    logits: [N, classes] without the class bias.

  Returns:
    exp of the mean divergence of a sample's classes from the block's.

  Raises:
    ValueError: no samples, or logits that are not finite.
  """
  if not len(logits) or not np.isfinite(logits).all():
    raise ValueError(
      f"logits of shape {logits.shape} must be of at least 1 sample and finite"
    )
  log_p = log_softmax(logits)
  # From logarithms: a mean probability may underflow, p log p must not be NaN.
  top = log_p.max(0)
  log_q = top + np.log(np.exp(log_p - top).mean(0))
  return float(np.exp((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))


def inception_score(
  logits: np.ndarray, block_size: int = INCEPTION_BLOCK
) -> float:
  """Plain mean of the scores of consecutive blocks, the last one shorter.

  Args:
    logits: [N, classes] without the class bias, in the samples' order.
    block_size: samples per block.
  """
  starts = range(0, max(len(logits), 1), block_size)
  return float(
    np.mean([block_score(logits[i : i + block_size]) for i in starts])
  )


def _factor(covariance: np.ndarray) -> np.ndarray:
  """F [D, rank] with F F^T the covariance, without its rounding noise."""
  values, vectors = np.linalg.eigh(covariance.astype(np.float64))
  noise = values[-1] * len(values) * np.finfo(np.float64).eps
  kept = values > max(noise, 0.0)
  return vectors[:, kept] * np.sqrt(values[kept])
