"""One pass of images through the feature network, keeping what is asked for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moh_jax.evaluation import statistics
from moh_jax.evaluation.fid import INCEPTION_BLOCK, block_score
from moh_jax.evaluation.image_sets import ImageSet
from moh_jax.evaluation.statistics import Gaussian, Moments
from moh_jax.models.inception import Features, InceptionV3, prepare

_CHUNK = 1024  # samples per update of the moments, which touch 64 MB each


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a set of images leaves behind; None where it was not asked for.

  Attributes:
    count: images.
    pool3: distribution of the pool3 features.
    spatial: distribution of the flattened spatial features.
    inception_score: mean over blocks of 5000 images.
    features: [N, 2048] float32 pool3 features, in order.
  """

  count: int
  pool3: Gaussian | None
  spatial: Gaussian | None
  inception_score: float | None
  features: np.ndarray | None


def make_extractor(
  model: InceptionV3, resize: str = "tf1"
) -> Callable[[Any, jax.Array], Features]:
  """Jitted features of a batch; compiles once per batch and image size.

  Args:
    model: the network.
    resize: see `prepare`.

  Returns:
    (params, images [B, X, Y, 3] uint8) -> Features.
  """

  @jax.jit
  def extract(params: Any, images: jax.Array) -> Features:
    return model.apply({"params": params}, prepare(images, resize))

  return extract


def summarize(
  extract: Callable[[np.ndarray], Features],
  images: ImageSet,
  batch_size: int,
  *,
  distributions: bool = True,
  score: bool = False,
  keep_features: bool = False,
  progress: Callable[[int], Any] = lambda count: None,
) -> Summary:
  """Streams a set of images through the network.

  Memory does not grow with the set, but for the kept features: 50,000 x 2048 x
  4 bytes are 400 MB.

  Args:
    extract: maps [batch_size, X, Y, 3] uint8 to Features on devices.
    images: the set.
    batch_size: images per call; the last batch is filled with copies, which
      are not counted.
    distributions: gather mean and covariance; needs two images.
    score: compute the Inception Score.
    keep_features: keep pool3 for precision and recall.
    progress: called with the number of images done since its last call.

  Raises:
    ValueError: one image where a covariance is asked for, a damaged file, or
      features that are not finite.
  """
  if distributions and len(images) < 2:
    raise ValueError(
      f"{images.path}: has one image; a covariance needs at least 2"
    )
  gathered = _Gathered(len(images), distributions, score, keep_features)
  waiting = None
  for batch in images.batches(batch_size):
    count = len(batch)
    fill = np.repeat(batch[-1:], batch_size - count, axis=0)
    features = extract(np.concatenate([batch, fill]))
    # One batch in flight: the device computes while the host reads and adds.
    if waiting is not None:
      progress(gathered.add(*waiting))
    waiting = features, count
  progress(gathered.add(*waiting))
  return gathered.finish()


class _Gathered:
  """Running sums and buffered features of one pass over a set of images."""

  def __init__(self, size: int, distributions: bool, score: bool, keep: bool):
    self._size, self._seen = size, 0
    self._distributions = distributions
    self._score = score
    self._keep = keep
    self._chunk: dict[str, list[np.ndarray]] = {"pool3": [], "spatial": []}
    self._moments: dict[str, Moments] = {}
    self._logits: list[np.ndarray] = []
    self._block_scores: list[float] = []
    self._features: np.ndarray | None = None

  def add(self, features: Features, count: int) -> int:
    """Adds the first `count` rows of a batch; returns count."""
    if self._distributions:
      spatial = np.asarray(features.spatial)[:count].reshape(count, -1)
      self._chunk["pool3"].append(np.asarray(features.pool3)[:count])
      self._chunk["spatial"].append(spatial)
      if sum(map(len, self._chunk["pool3"])) >= _CHUNK:
        self._flush_moments()
    if self._score:
      self._logits.append(np.asarray(features.logits)[:count])
      while sum(map(len, self._logits)) >= INCEPTION_BLOCK:
        logits = np.concatenate(self._logits)
        self._block_scores.append(block_score(logits[:INCEPTION_BLOCK]))
        self._logits = [logits[INCEPTION_BLOCK:]]
    if self._keep:
      if self._features is None:  # at once: joining parts would need it twice
        shape = (self._size, features.pool3.shape[-1])
        self._features = np.empty(shape, np.float32)
      rows = slice(self._seen, self._seen + count)
      self._features[rows] = np.asarray(features.pool3)[:count]
    self._seen += count
    return count

  def finish(self) -> Summary:
    """Adds the last, partly filled chunk and block and returns the summary."""
    if self._distributions:
      self._flush_moments()
    if self._score and sum(map(len, self._logits)):
      self._block_scores.append(block_score(np.concatenate(self._logits)))
    gaussians = {name: m.gaussian() for name, m in self._moments.items()}
    return Summary(
      self._seen,
      gaussians.get("pool3"),
      gaussians.get("spatial"),
      float(np.mean(self._block_scores)) if self._score else None,
      self._features,
    )

  def _flush_moments(self) -> None:
    for name, rows in self._chunk.items():
      if rows:
        update = statistics.moments(np.concatenate(rows))
        before = self._moments.get(name)
        self._moments[name] = (
          update if before is None else statistics.merge(before, update)
        )
        rows.clear()
