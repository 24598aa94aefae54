"""Metrics of generated images: FID, Inception Score, precision and recall.

NumPy in float64, as openai/guided-diffusion's evaluations/evaluator.py defines
them; float32 covariances would cost up to 1e-3 of a distance.
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from moh_jax.runtime.files import (
  npz_damage,
  npz_names,
  open_member,
  read_npz,
  replacing,
)
from moh_jax.runtime.json_files import MAX_BYTES, parse_json

INCEPTION_BLOCK = 5000  # samples per block of the published scores
NEIGHBOURS = 3  # of the published precision and recall
_KEYS = ("mu", "sigma", "mu_s", "sigma_s")  # of ADM's reference batches
_MADE_WITH = "made_with"  # JSON as bytes; other programs' files have none
_ROWS = 256  # with 50,000 columns, 100 MB of distances
_COLUMNS = 4096  # in float64 at a time: all would double the memory


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
    """Mean and sample covariance (divided by count - 1) of two or more.

    Raises:
      FloatingPointError: features that are not finite.
    """
    if not np.isfinite(self.scatter).all():
      raise FloatingPointError("some features are NaN or infinite")
    return Gaussian(self.mean, self.scatter / (self.count - 1))


def moments(features: np.ndarray, before: Moments | None = None) -> Moments:
  """Moments of one batch and of those before it.

  The pairwise update of Chan, Golub and LeVeque (1979) keeps sums centred, so
  that nothing cancels however large the mean is.

  Args:
    features: [N, D] of any float type, N at least 1.
    before: of the samples seen so far.
  """
  features = features.astype(np.float64)
  mean = features.mean(0)
  centred = features - mean
  own = Moments(len(features), mean, centred.T @ centred)
  if before is None:
    return own
  count = before.count + own.count
  shift = own.mean - before.mean
  between = before.count * own.count / count
  return Moments(
    count,
    before.mean + shift * (own.count / count),
    before.scatter + own.scatter + between * np.outer(shift, shift),
  )


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
  """Frechet distance of two normal distributions (arXiv:1706.08500).

  Rounding may leave a tiny negative number for 0. See `frechet_terms`.
  """
  mean, trace_a, trace_b, trace_root = frechet_terms(a, b)
  return mean + trace_a + trace_b - 2 * trace_root


def frechet_terms(
  a: Gaussian, b: Gaussian
) -> tuple[float, float, float, float]:
  """The terms of a Frechet distance.

  With factors S = F F^T from eigenvalues, the trace of (S_a S_b)^(1/2) is the
  sum of the singular values of F_a^T F_b. Singular covariances (fewer samples
  than dimensions) are no special case, so nothing is added to a diagonal.

  Args:
    a: of the generated images, finite.
    b: of the reference, with as many dimensions.

  Returns:
    The squared distance of the means, the traces of both covariances, and the
    trace of the root of their product.
  """
  product = _factor(a.covariance).T @ _factor(b.covariance)
  roots = np.linalg.svd(product, compute_uv=False) if product.size else 0.0
  shift = a.mean.astype(np.float64) - b.mean.astype(np.float64)
  return (
    float(shift @ shift),
    float(np.trace(a.covariance, dtype=np.float64)),
    float(np.trace(b.covariance, dtype=np.float64)),
    float(np.sum(roots)),
  )


def _factor(covariance: np.ndarray) -> np.ndarray:
  """F [D, rank] with F F^T the covariance, without its rounding noise."""
  values, vectors = np.linalg.eigh(covariance.astype(np.float64))
  noise = values[-1] * len(values) * np.finfo(np.float64).eps
  kept = values > max(noise, 0.0)
  return vectors[:, kept] * np.sqrt(values[kept])


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Log-probabilities [N, classes] float64; finite for finite logits."""
  logits = logits.astype(np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def block_score(logits: np.ndarray) -> float:
  """Inception Score of one block (arXiv:1606.03498).

  The published score is the plain mean over consecutive blocks of 5000 samples,
  of which the last may be shorter.

  Args:
    logits: [N, classes] without the class bias.

  Returns:
    exp of the mean divergence of a sample's classes from the block's.
  """
  log_p = log_softmax(logits)
  # From logarithms: a mean probability may underflow, p log p must not be NaN.
  top = log_p.max(0)
  log_q = top + np.log(np.exp(log_p - top).mean(0))
  return float(np.exp((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()))


def precision_recall(
  generated: np.ndarray, reference: np.ndarray, k: int = NEIGHBOURS
) -> tuple[float, float]:
  """Shares of each set that lie in the other's manifold (arXiv:1904.06991).

  A set's manifold is the union of balls around its features, each as large as
  the distance to the k-th nearest other feature of the set. Distances are
  squared, float64 and exact to rounding: a matrix product finds the pairs that
  matter, and the few that its rounding leaves open are computed from
  differences. So equal points have distance 0 and ties count as inside, as the
  definition says.

  Args:
    generated: [M, D] float32 features.
    reference: [N, D] float32 features.
    k: neighbours.

  Returns:
    Precision (of the generated) and recall (of the reference).
  """
  precision = in_manifold(generated, reference, knn_radii(reference, k)).mean()
  recall = in_manifold(reference, generated, knn_radii(generated, k)).mean()
  return float(precision), float(recall)


def knn_radii(features: np.ndarray, k: int = NEIGHBOURS) -> np.ndarray:
  """Squared distance of each feature to its k-th nearest other one.

  Args:
    features: [N, D], more than k.
    k: 1 is the nearest other feature; copies of a feature are others.

  Returns:
    [N] float64.
  """
  radii = np.empty(len(features))
  # A collapsed generator gives thousands of copies: each would be compared
  # with all others, one by one.
  copies = collections.Counter(row.tobytes() for row in features)
  for part, distances, slack in _distances(features, features):
    # Index 0 of a sorted row is the feature itself.
    bound = np.partition(distances, k)[:, k, None] + 2 * slack
    for i, near in enumerate(distances <= bound, part.start):
      if copies[features[i].tobytes()] > k:
        radii[i] = 0.0
      else:
        exact = _distances_to(features[i], features[near])
        radii[i] = np.partition(exact, k)[k]
  return radii


def in_manifold(
  points: np.ndarray, features: np.ndarray, radii: np.ndarray
) -> np.ndarray:
  """Which points lie in a ball of at least one feature.

  Args:
    points: [M, D].
    features: [N, D].
    radii: [N] squared radii of the features.

  Returns:
    [M] bool; a point on the surface of a ball is inside.
  """
  inside = np.zeros(len(points), bool)
  for part, distances, slack in _distances(points, features):
    found = (distances <= radii - slack).any(-1)
    near = (distances <= radii + slack) & ~found[:, None]
    for i in np.flatnonzero(near.any(-1)):
      exact = _distances_to(points[part][i], features[near[i]])
      found[i] = (exact <= radii[near[i]]).any()
    inside[part] = found
  return inside


def _distances(
  points: np.ndarray, features: np.ndarray
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
  """Squared distances from matrix products, a part of the points at a time.

  Yields:
    The part, its distances [rows, N], and a bound [rows, 1] on their rounding
    error: a product of `dim` terms errs by at most dim * eps * |x| |y|.
  """
  own, norms = (
    np.einsum("nd,nd->n", x, x, dtype=np.float64) for x in (points, features)
  )
  eps = 4 * (points.shape[1] + 4) * np.finfo(np.float64).eps
  for start in range(0, len(points), _ROWS):
    part = slice(start, start + _ROWS)
    rows, of_rows = -2 * points[part].astype(np.float64), own[part, None]
    distances = np.empty((len(rows), len(features)))
    for i in range(0, len(features), _COLUMNS):
      columns = features[i : i + _COLUMNS].astype(np.float64)
      distances[:, i : i + _COLUMNS] = rows @ columns.T
    distances += of_rows + norms
    yield part, distances, eps * (of_rows + norms.max())


def _distances_to(point: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Squared distances [n] from differences; the same bits in either order."""
  return ((others - point.astype(np.float64)) ** 2).sum(-1)


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Distributions of the features of a set of images, as a file has them.

  Attributes:
    pool3: of the pool3 features.
    spatial: of the spatial features; None in files of pytorch-fid, which serve
      FID alone.
    made_with: "resize" and "inception" (SHA-256 of the network's parameters),
      where the file says so.
  """

  pool3: Gaussian
  spatial: Gaussian | None
  made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def check_made_with(self, ours: Mapping[str, str], path: str) -> None:
    """Raises ValueError where the file says that it was made with others."""
    for name, value in ours.items():
      stored = self.made_with.get(name, value)
      if stored != value:
        raise ValueError(
          f"{path}: its statistics were made with {name}={stored[:16]!r}, not "
          f"{value[:16]!r}; distances would mean nothing"
        )


def has_statistics(path: str | os.PathLike) -> bool:
  """Whether a path is an npz file with statistics: the key "mu" decides.

  Raises:
    FileNotFoundError: there is no such path.
    ValueError: a file that is not an npz archive.
  """
  return not pathlib.Path(path).is_dir() and "mu" in npz_names(path)


def read_statistics(
  path: str | os.PathLike, pool_dim: int, spatial_dim: int
) -> Statistics:
  """Reads the statistics of a reference file, in ADM's format.

  Args:
    path: npz file with mu, sigma, mu_s and sigma_s of any float type, or the
      first two alone.
    pool_dim: of mu.
    spatial_dim: of mu_s, positions row by row with the channel fastest.

  Returns:
    The distributions, float64.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an array is missing, damaged, of another shape or type, or not
      finite.
  """
  names = npz_names(path)
  keys = [key for key in _KEYS if key in names]
  if keys not in (list(_KEYS), list(_KEYS[:2])):
    missing = [key for key in _KEYS if key not in names]
    raise ValueError(
      f"{path}: has {keys} but lacks {missing}; statistics are all of {_KEYS}, "
      "or mu and sigma alone"
    )
  shapes = ((pool_dim,), (pool_dim,) * 2, (spatial_dim,), (spatial_dim,) * 2)
  for key, shape in zip(keys, shapes):  # before what may be large is read
    with open_member(path, key) as (_, (found, _, dtype)):
      if found != shape or dtype.kind != "f":
        raise ValueError(
          f"{path}: {key} has dtype {dtype} and shape {found}; must be a float "
          f"array of shape {shape}"
        )
  arrays = []
  for key, array in read_npz(path, keys).items():
    if not np.isfinite(array).all():
      raise ValueError(f"{path}: {key} holds NaN or infinity")
    if array.ndim == 2 and not _is_covariance(array):
      raise ValueError(
        f"{path}: {key} must be a covariance, symmetric and without negative "
        "eigenvalues"
      )
    arrays.append(array.astype(np.float64))
  made_with = {}
  if _MADE_WITH in names:
    with open_member(path, _MADE_WITH) as (stream, _), npz_damage(path):
      content = stream.read(MAX_BYTES + 1)
    made_with = parse_json(content, dict[str, str], f"{path}: {_MADE_WITH}")
  spatial = Gaussian(*arrays[2:]) if len(arrays) > 2 else None
  return Statistics(Gaussian(*arrays[:2]), spatial, made_with)


def _is_covariance(matrix: np.ndarray) -> bool:
  """Whether a matrix is one, up to the rounding of its dtype."""
  noise = 4 * max(float(np.finfo(matrix.dtype).eps), 1e-9)
  matrix = matrix.astype(np.float64)
  noise *= abs(np.trace(matrix))
  is_symmetric = np.abs(matrix - matrix.T).max() <= noise
  return is_symmetric and np.linalg.eigvalsh(matrix)[0] >= -noise


def write_statistics(path: str | os.PathLike, statistics: Statistics) -> None:
  """Writes a reference file that is complete or absent, never partial."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  arrays = dict(zip(_KEYS, (*statistics.pool3, *(statistics.spatial or ()))))
  made_with = json.dumps(dict(statistics.made_with)).encode()
  arrays[_MADE_WITH] = np.frombuffer(made_with, np.uint8)
  with replacing(path) as temporary, temporary.open("wb") as file:
    np.savez(file, **arrays)
