"""Metrics of generated images: FID, Inception Score, precision and recall.

NumPy in float64, as openai/guided-diffusion's evaluations/evaluator.py defines
them; float32 covariances would cost up to 1e-3 of a distance. Images pass the
network a batch at a time.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tqdm

from moh_jax.data.decode import read_image
from moh_jax.data.sources import find_images
from moh_jax.data.transforms import center_crop
from moh_jax.evaluation.metrics import one_late
from moh_jax.models.inception import POOL_DIM, SPATIAL_DIM, Features
from moh_jax.runtime.files import replacing
from moh_jax.runtime.parameters import check_finite

INCEPTION_BLOCK = 5000  # samples per block of the published scores
NEIGHBOURS = 3  # of the published precision and recall
_KEYS = ("mu", "sigma", "mu_s", "sigma_s")  # of ADM's reference batches
_ROWS = 256  # with 50,000 columns, 100 MB of distances
_THREADS = 8
# Of an npz file that is none, lacks an array or is damaged.
_DAMAGE = (
  *(ValueError, KeyError, TypeError, EOFError),
  *(zipfile.BadZipFile, zlib.error),
)
_SEED = 0  # of the order of a folder's images


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
    """Mean and sample covariance (divided by count - 1) of two or more."""
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
  scatter, own = centred.T @ centred, len(features)
  if before is None:
    return Moments(own, mean, scatter)
  count, shift = before.count + own, mean - before.mean
  between = before.count * own / count * np.outer(shift, shift)
  mean = before.mean + shift * (own / count)
  return Moments(count, mean, before.scatter + scatter + between)


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
  shift = a.mean.astype(np.float64) - b.mean.astype(np.float64)
  return (
    float(shift @ shift),
    float(np.trace(a.covariance, dtype=np.float64)),
    float(np.trace(b.covariance, dtype=np.float64)),
    float(np.linalg.svd(product, compute_uv=False).sum()),
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
  the distance to the k-th nearest other feature of the set; a point on the
  surface of a ball is inside.

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
  """Squared distance [N] float64 of each feature to its k-th nearest other one.

  Copies of a feature are others; k is less than N.
  """
  # The nearest one is the feature itself.
  parts = (np.partition(d, k)[:, k] for d, _ in _distances(features, features))
  return np.concatenate(list(parts))


def in_manifold(
  points: np.ndarray, features: np.ndarray, radii: np.ndarray
) -> np.ndarray:
  """Which of M points lie in a ball of at least one feature, [M] bool."""
  parts = []
  for distances, rounding in _distances(points, features):
    parts.append((distances <= radii + rounding).any(-1))
  return np.concatenate(parts)


def _distances(
  points: np.ndarray, features: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Squared distances from matrix products, a part of the points at a time.

  Yields:
    Distances [rows, N], and a bound [rows, 1] on their rounding error: a
    product of `dim` terms errs by at most dim * eps * |x| |y|.
  """
  features = features.astype(np.float64)
  norms = np.einsum("nd,nd->n", features, features)  # without a copy
  eps = 4 * (points.shape[1] + 4) * np.finfo(np.float64).eps
  for start in range(0, len(points), _ROWS):
    rows = points[start : start + _ROWS].astype(np.float64)
    own = np.square(rows).sum(-1, keepdims=True)
    distances = own + norms - 2 * rows @ features.T
    yield np.maximum(distances, 0.0), eps * (own + norms.max())


class Statistics(NamedTuple):
  """Distributions of the features of a set of images.

  Attributes:
    pool3: of the pool3 features.
    spatial: of the spatial features; None in files of pytorch-fid, which serve
      FID alone.
  """

  pool3: Gaussian
  spatial: Gaussian | None


@contextlib.contextmanager
def _opened(path: str | os.PathLike) -> Iterator[np.lib.npyio.NpzFile]:
  """Opens an npz file; ValueError names one that is none, or damaged."""
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      yield arrays
  except _DAMAGE as error:
    raise ValueError(f"{path}: no npz file as needed: {error}") from error


def read_statistics(
  path: str | os.PathLike,
  pool_dim: int = POOL_DIM,
  spatial_dim: int = SPATIAL_DIM,
) -> Statistics | None:
  """Reads the statistics of a reference file, in ADM's or pytorch-fid's format.

  Args:
    path: npz file with mu, sigma, mu_s and sigma_s, or the first two alone.
    pool_dim: of mu.
    spatial_dim: of mu_s, positions row by row with the channel fastest.

  Returns:
    The distributions, float64; None for a folder, and a file without "mu".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an array is damaged, of another shape or not finite.
  """
  if pathlib.Path(path).is_dir():
    return None
  with _opened(path) as arrays:
    if "mu" not in arrays:
      return None
    found = [arrays[key] for key in _KEYS if key in arrays]
  shapes = [(pool_dim,), (pool_dim,) * 2, (spatial_dim,), (spatial_dim,) * 2]
  for key, array, shape in zip(_KEYS, found, shapes):
    if array.shape != shape or not np.isfinite(array).all():
      raise ValueError(
        f"{path}: {key} of shape {array.shape} must be finite and of {shape}"
      )
  if len(found) not in (2, 4):
    raise ValueError(f"{path}: must hold {_KEYS}, or mu and sigma")
  mu, sigma, *spatial = (array.astype(np.float64) for array in found)
  return Statistics(
    Gaussian(mu, sigma), Gaussian(*spatial) if spatial else None
  )


def has_images(path: str | os.PathLike) -> bool:
  """Whether an npz file holds images, maybe beside their statistics."""
  with _opened(path) as arrays:
    return "arr_0" in arrays


def write_statistics(path: str | os.PathLike, statistics: Statistics) -> None:
  """Writes a reference file that is complete or absent, never partial."""
  arrays = (*statistics.pool3, *(statistics.spatial or ()))
  with replacing(path) as temporary, temporary.open("wb") as file:
    np.savez(file, **dict(zip(_KEYS, arrays)))


class ImageSet(NamedTuple):
  """A set of equally large images, made by `open_images`.

  Attributes:
    path: its file or folder.
    count: images.
    batches: images of a batch -> iterator of [b, X, Y, 3] uint8 in order, of
      which the last may be smaller; ValueError if a file is damaged.
  """

  path: str
  count: int
  batches: Callable[[int], Iterator[np.ndarray]]


def open_images(
  path: str | os.PathLike, image_size: int | None = None
) -> ImageSet:
  """Opens a set of images.

  Images of a folder come in random order, the same in each call: the Inception
  Score compares the images of a block, which would be of few classes in order
  of the paths. Grey images get three equal channels.

  Args:
    path: an npz file with `arr_0`, uint8 [N, X, Y, 3] or of grey images [N, X,
      Y, 1], or a folder with images of any format Pillow reads.
    image_size: rows and columns to which images of a folder are cropped, as in
      training of diffusion models; None: all must have one size.

  Raises:
    FileNotFoundError: there is no such file or folder, or no image in it.
    ValueError: another layout or dtype, no images, a damaged file.
  """
  if pathlib.Path(path).is_dir():
    return _open_folder(str(path), image_size)
  with _member(path) as (_, (shape, by_columns, dtype)):
    is_image = len(shape) == 4 and shape[-1] in (1, 3)
    if dtype != np.uint8 or not is_image or by_columns:
      raise ValueError(
        f"arr_0 has dtype {dtype} and shape {shape}; images must be uint8 of "
        "shape (images, X, Y, 3 or 1), in C order"
      )

  def batches(size: int) -> Iterator[np.ndarray]:
    with _member(path) as (stream, _):
      for start in range(0, shape[0], size):
        wanted = (min(size, shape[0] - start), *shape[1:])
        data = stream.read(int(np.prod(wanted)))  # never all of them in memory
        part = np.frombuffer(data, np.uint8).reshape(wanted)
        yield np.broadcast_to(part, (*wanted[:3], 3))

  return ImageSet(str(path), shape[0], batches)


@contextlib.contextmanager
def _member(path: str | os.PathLike) -> Iterator[tuple]:
  """Opens arr_0: a stream of its data; shape, whether Fortran order, dtype."""
  with _opened(path) as arrays, arrays.zip.open("arr_0.npy") as stream:
    if np.lib.format.read_magic(stream) == (1, 0):
      yield stream, np.lib.format.read_array_header_1_0(stream)
    else:
      yield stream, np.lib.format.read_array_header_2_0(stream)


def _open_folder(path: str, image_size: int | None) -> ImageSet:
  files = find_images([path])
  order = np.random.RandomState(_SEED).permutation(len(files))
  size = (image_size,) * 2 if image_size else read_image(files[0], 3).shape[:2]

  def read(file: str) -> np.ndarray:
    image = read_image(file, 3)
    if image_size:
      return center_crop(image, size)  # small images are enlarged
    if image.shape[:2] != size:
      raise ValueError(
        f"{file} has {image.shape[0]} rows x {image.shape[1]} columns, must "
        f"have {size[0]} x {size[1]}; --image-size N crops to N x N"
      )
    return image

  def batches(size: int) -> Iterator[np.ndarray]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      for start in range(0, len(files), size):
        part = [files[i] for i in order[start : start + size]]
        yield np.stack(list(pool.map(read, part)))

  return ImageSet(path, len(files), batches)


class Summary(NamedTuple):
  """Features of a set of images.

  Attributes:
    statistics: distributions of the pool3 and the spatial features.
    inception_score: mean over blocks of 5000 images.
    features: [N, 2048] float32 pool3 features, in order; None if not kept.
  """

  statistics: Statistics
  inception_score: float
  features: np.ndarray | None


def summarize(
  extract: Callable[[np.ndarray], Features],
  images: ImageSet,
  batch_size: int,
  *,
  keep: bool = False,
) -> Summary:
  """Streams a set of two and more images through the network.

  Memory does not grow with the set, but for the kept features: 50,000 x 2048 x
  4 bytes are 400 MB.

  Args:
    extract: maps [batch_size, X, Y, 3] uint8 to Features on devices.
    images: the set.
    batch_size: images per call; the last batch is filled with copies, which
      are not counted.
    keep: keep pool3 for precision and recall.

  Raises:
    ValueError: too few images, or a damaged file.
    FloatingPointError: features that are not finite.
  """
  needed = NEIGHBOURS + 1 if keep else 2  # a covariance needs two
  if images.count < needed:
    raise ValueError(
      f"{images.path}: {needed} images or more are needed, not {images.count}"
    )

  def computed() -> Iterator[tuple[Features, int]]:
    for batch in images.batches(batch_size):
      fill = np.repeat(batch[-1:], batch_size - len(batch), axis=0)
      yield extract(np.concatenate([batch, fill])), len(batch)

  pool3 = spatial = None
  logits, kept = [], []
  with tqdm.tqdm(total=images.count, unit="image", disable=None) as bar:
    for features, count in one_late(computed()):
      rows = [np.asarray(x)[:count].reshape(count, -1) for x in features]
      check_finite(rows, f"the features of {images.path}")
      pool3, spatial = moments(rows[0], pool3), moments(rows[1], spatial)
      logits.append(rows[2])
      if keep:
        kept.append(rows[0])
      bar.update(count)
  scores = np.concatenate(logits)  # [N, 1008]
  blocks = range(0, len(scores), INCEPTION_BLOCK)
  found = [block_score(scores[i : i + INCEPTION_BLOCK]) for i in blocks]
  return Summary(
    Statistics(pool3.gaussian(), spatial.gaussian()),
    float(np.mean(found)),
    np.concatenate(kept) if keep else None,
  )
