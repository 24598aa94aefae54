"""Precision and recall of generated images (arXiv:1904.06991).

A set's manifold is the union of balls around its features, each as large as the
distance to the k-th nearest other feature of the set. Distances are squared,
float64 and exact to rounding: a matrix product finds the pairs that matter, and
the few that its rounding leaves open are computed from differences. So equal
points have distance 0 and ties count as inside, as the definition says.
"""

import collections
from collections.abc import Iterator

import numpy as np

NEIGHBOURS = 3  # of the published numbers
_ROWS = 512  # with 50,000 columns, 200 MB of distances
_COLUMNS = 4096
_PAIRS = 1024  # differences held at a time


def precision_recall(
  generated: np.ndarray, reference: np.ndarray, k: int = NEIGHBOURS
) -> tuple[float, float]:
  """Shares of each set that lie in the other's manifold.

  Args:
    generated: [M, D] float32 features.
    reference: [N, D] float32 features.
    k: neighbours.

  Returns:
    Precision (of the generated) and recall (of the reference).

  Raises:
    ValueError: a set has k or fewer samples, or the dimensions differ.
  """
  for name, features in (("generated", generated), ("reference", reference)):
    check_samples(len(features), k, f"the {name} set")
  precision = in_manifold(generated, reference, knn_radii(reference, k)).mean()
  recall = in_manifold(reference, generated, knn_radii(generated, k)).mean()
  return float(precision), float(recall)


def check_samples(count: int, k: int, what: str) -> None:
  """Raises ValueError unless a set of `count` samples has k-th neighbours."""
  if k < 1:
    raise ValueError(f"k={k} must be at least 1")
  if count <= k:
    raise ValueError(
      f"precision and recall with k={k} need at least {k + 1} samples, {what} "
      f"has {count}"
    )


def knn_radii(features: np.ndarray, k: int = NEIGHBOURS) -> np.ndarray:
  """Squared distance of each feature to its k-th nearest other one.

  Args:
    features: [N, D].
    k: 1 is the nearest other feature; copies of a feature are others.

  Returns:
    [N] float64.

  Raises:
    ValueError: k or fewer features.
  """
  check_samples(len(features), k, "the set")
  norms = _squared_norms(features)
  radii = np.empty(len(features))
  # A collapsed generator gives thousands of copies: each would be compared
  # with all others, one by one.
  copies = collections.Counter(row.tobytes() for row in features)
  for start in range(0, len(features), _ROWS):
    rows = features[start : start + _ROWS]
    distances = np.empty((len(rows), len(features)))
    for part, columns in _columns(features):
      distances[:, part] = _products(rows, columns)
    own = norms[start : start + _ROWS, None]
    distances += own + norms
    slack = _slack(features.shape[1], own[:, 0], norms.max())
    # Index 0 of a sorted row is the feature itself.
    bound = np.partition(distances, k, axis=-1)[:, k] + 2 * slack
    for i, row in enumerate(rows):
      if copies[row.tobytes()] > k:
        radii[start + i] = 0.0
        continue
      near = features[distances[i] <= bound[i]]
      exact = _distances_to(row, near)
      radii[start + i] = np.partition(exact, k)[k]
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

  Raises:
    ValueError: the dimensions differ.
  """
  if points.shape[1:] != features.shape[1:]:
    raise ValueError(
      f"points {points.shape} and features {features.shape} must have the same "
      "dimension"
    )
  norms, point_norms = _squared_norms(features), _squared_norms(points)
  inside = np.zeros(len(points), bool)
  for start in range(0, len(points), _ROWS):
    rows = points[start : start + _ROWS]
    own = point_norms[start : start + _ROWS, None]
    slack = _slack(points.shape[1], own, norms.max())
    found = np.zeros(len(rows), bool)
    for part, columns in _columns(features):
      distances = _products(rows, columns) + own + norms[part]
      found |= (distances <= radii[part] - slack).any(-1)
      near = (distances <= radii[part] + slack) & ~found[:, None]
      for i in np.flatnonzero(near.any(-1)):
        exact = _distances_to(rows[i], features[part][near[i]])
        found[i] = (exact <= radii[part][near[i]]).any()
    inside[start : start + _ROWS] = found
  return inside


def _columns(features: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
  """Parts of the features in float64: all at once would double the memory."""
  for start in range(0, len(features), _COLUMNS):
    part = slice(start, start + _COLUMNS)
    yield part, features[part].astype(np.float64)


def _products(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
  """-2 x y, the part of |x - y|^2 that needs both."""
  return (-2 * rows.astype(np.float64)) @ columns.T


def _squared_norms(features: np.ndarray) -> np.ndarray:
  norms = [(part**2).sum(-1) for _, part in _columns(features)]
  if not (norms and np.isfinite(total := np.concatenate(norms)).all()):
    raise ValueError("features must be finite and at least one")
  return total


def _slack(dim: int, norms: np.ndarray, largest: float) -> np.ndarray:
  """Bound on the rounding error of a distance from products.

  A dot product of `dim` terms errs by at most dim * eps * |x| |y|.
  """
  return 4 * (dim + 4) * np.finfo(np.float64).eps * (norms + largest)


def _distances_to(point: np.ndarray, others: np.ndarray) -> np.ndarray:
  """Squared distances [n] from differences; the same bits in either order."""
  point = point.astype(np.float64)
  parts = [
    ((others[i : i + _PAIRS] - point) ** 2).sum(-1)
    for i in range(0, len(others), _PAIRS)
  ]
  return np.concatenate(parts)
