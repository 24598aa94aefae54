"""`python -m moh_jax fid`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from moh_jax.cli import command
from moh_jax.config import MeshConfig
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  from moh_jax.evaluation.fid import Statistics
  from moh_jax.evaluation.image_metrics import ImageSet, Summary


_MOST_BATCH_BYTES = 1 << 30  # of a device: 64 images of 1024 x 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Output):
  """Score images: FID, sFID, Inception Score, precision, recall.

  Attributes:
    samples: to be scored: npz file with arr_0 (uint8 [N, X, Y, 3 or 1]) or
      folder of images.
    reference: to score against: the same, or an npz file with statistics (mu,
      sigma, mu_s, sigma_s), which then serve FID and sFID; of pytorch-fid (mu,
      sigma), FID.
    inception: weights of the Inception network, pytorch-fid's
      pt_inception-2015-12-05-6726825d.pth.
    metrics: of fid, sfid, is, pr (default: all; without --reference: is).
    resize: to 299 pixels: as ADM and DiT's numbers, or as pytorch-fid.
    image_size: crop the images of folders to so many rows and columns, as in
      training of diffusion models (default: all must have one size).
    batch_size: images per batch.
    save_stats: write the statistics of the samples as a reference file.
  """

  samples: command.InPath
  reference: command.InPath | None = None
  inception: command.Place | None = None
  metrics: tuple[Literal["fid", "sfid", "is", "pr"], ...] = ()
  resize: Literal["tf1", "ptfid"] = "tf1"
  image_size: Count | None = None
  batch_size: Count = 64
  save_stats: command.OutFile | None = None

  def check(self) -> None:
    """What compares has a reference."""
    super().check()
    needing = [name for name in self.metrics if name != "is"]
    given = filter(None, (self.samples, self.reference))
    is_folder = any(not path.endswith(".npz") for path in given)
    self.need("image_size", is_folder, "needs a folder of images")
    if needing and not self.reference:
      self.fail("metrics", "need --reference; without one only is")


@dataclasses.dataclass(frozen=True)
class _Side:
  """The samples or the reference, checked and not yet read.

  Attributes:
    name: "samples" or "reference".
    path: as given.
    images: None for a file of statistics alone.
    statistics: that the file states.
  """

  name: str
  path: str
  images: ImageSet | None
  statistics: Statistics | None


@alive("scoring images")
def run(options: Options) -> int:
  """Prints the metrics of the samples."""
  from moh_jax.evaluation import fid
  from moh_jax.runtime import sharding

  mesh = sharding.make_mesh(MeshConfig())
  sharding.check_batch("--batch-size", options.batch_size, mesh)
  given = {"samples": options.samples, "reference": options.reference}
  sides = [
    _open(name, path, options.image_size)
    for name, path in given.items()
    if path
  ]
  names = options.metrics
  if not names:
    names = ("fid", "sfid", "is", "pr") if options.reference else ("is",)
  passes = [_wanted(side, names, options.save_stats) for side in sides]
  sizes = [options.batch_size] * len(sides)
  for i, (side, wanted) in enumerate(zip(sides, passes)):
    if any(wanted.values()):
      sizes[i] = _batch_size(side.images, options.batch_size, mesh.size)
  extract, made_with = None, {}
  if any(any(wanted.values()) for wanted in passes):
    extract, made_with = _extractor(options)
  for side in sides:
    if side.statistics:
      made_with = made_with or side.statistics.made_with
      side.statistics.check_made_with(made_with, side.path)
  for side, wanted in zip(sides, passes):
    if wanted["distributions"]:
      _warn(side, names)
  results = [
    _summary(side, extract, size, **wanted)
    for side, wanted, size in zip(sides, passes, sizes)
  ]
  first, last = results[0], results[-1]
  if options.save_stats:
    saved = fid.Statistics(first.pool3, first.spatial, made_with)
    fid.write_statistics(options.save_stats, saved)
  distance, both = fid.frechet_distance, (first, last)
  precision = recall = None
  if "pr" in names:
    precision, recall = fid.precision_recall(*(x.features for x in both))
  metrics = {
    "fid": distance(*(x.pool3 for x in both)) if "fid" in names else None,
    "sfid": distance(*(x.spatial for x in both)) if "sfid" in names else None,
    "inception_score": first.inception_score,
    "precision": precision,
    "recall": recall,
  }
  found = {name: x for name, x in metrics.items() if x is not None}
  sharding.check_finite(found, "the metrics")
  metrics |= {
    **given,
    "num_samples": first.count or None,  # None: a file's statistics
    "num_reference": last.count or None if options.reference else None,
    "resize": options.resize,
  }
  options.give(metrics, command.metric_lines(metrics))
  return 0


def _open(name: str, path: str, image_size: int | None) -> _Side:
  """Checks one side; reads statistics, not images."""
  from moh_jax.evaluation import fid
  from moh_jax.evaluation.image_metrics import open_images
  from moh_jax.models import inception
  from moh_jax.runtime.files import npz_names

  statistics, images = None, None
  if fid.has_statistics(path):
    sizes = inception.POOL_DIM, inception.SPATIAL_DIM
    statistics = fid.read_statistics(path, *sizes)
  if statistics is None or "arr_0" in npz_names(path):
    images = open_images(path, image_size)
  return _Side(name, path, images, statistics)


def _wanted(
  side: _Side, metrics: tuple[str, ...], save_stats: str | None
) -> dict[str, bool]:
  """What the images of one side go through the network for.

  Raises:
    ValueError: the side's file cannot give that.
  """
  from moh_jax.evaluation import fid

  flag = f"--{side.name} {side.path}"
  images, statistics = side.images, side.statistics
  is_samples = side.name == "samples"
  is_compared = bool({"fid", "sfid"} & set(metrics))
  wanted = {
    "distributions": (is_compared or (is_samples and bool(save_stats)))
    and statistics is None,
    "score": is_samples and "is" in metrics,
    "keep_features": "pr" in metrics,
  }
  if (wanted["score"] or wanted["keep_features"]) and images is None:
    raise ValueError(
      f"{flag}: holds statistics alone; precision, recall and Inception "
      "Score need the images (arr_0), --metrics fid,sfid does not"
    )
  if wanted["keep_features"] and images.count <= (k := fid.NEIGHBOURS):
    raise ValueError(
      f"precision and recall with k={k} need at least {k + 1} samples, {flag} "
      f"has {images.count}"
    )
  if statistics and statistics.spatial is None and "sfid" in metrics:
    raise ValueError(
      f"{flag}: holds mu and sigma alone, which serve --metrics fid; sfid "
      "needs mu_s and sigma_s too"
    )
  if wanted["distributions"] and images.count < 2:
    raise ValueError(f"{flag}: has one image; a covariance needs at least 2")
  return wanted


def _batch_size(images: ImageSet, wanted: int, devices: int) -> int:
  """Images of a batch; fewer of large ones or few, which change no figure.

  Raises:
    ValueError: one of a device is too large.
  """
  rows, columns = images.size
  bytes_per_image = rows * columns * 3 * (1 + 4)  # uint8 and float32
  most = _MOST_BATCH_BYTES // bytes_per_image * devices
  if not most:
    raise ValueError(
      f"{images.path}: images of {rows} rows x {columns} columns are too "
      "large; scale them"
    )
  return min(wanted, most, -(-images.count // devices) * devices)


def _warn(side: _Side, metrics: Sequence[str]) -> None:
  """Says how many images are missing for covariances of full rank."""
  from moh_jax.models import inception

  every = {"fid": inception.POOL_DIM, "sfid": inception.SPATIAL_DIM}
  dims = {name: dim for name, dim in every.items() if name in metrics} or every
  if side.images.count <= (largest := max(dims.values())):
    print(
      f"warning: {side.path}: {side.images.count} images give a singular "
      f"covariance; {' and '.join(dims)} need at least {largest + 1}, and "
      "published numbers use 50000",
      file=sys.stderr,
    )


def _summary(
  side: _Side, extract: Callable | None, batch_size: int, **wanted: bool
) -> Summary:
  """The side's summary; the file's statistics where it states them."""
  import tqdm

  from moh_jax.evaluation.image_metrics import Summary, summarize

  summary = Summary()
  if any(wanted.values()):
    with tqdm.tqdm(
      total=side.images.count, desc=side.name, unit="image", disable=None
    ) as bar:
      summary = summarize(
        extract, side.images, batch_size, **wanted, progress=bar.update
      )
  if stated := side.statistics:
    summary = dataclasses.replace(
      summary, pool3=stated.pool3, spatial=stated.spatial
    )
  return summary


def _extractor(options: Options) -> tuple[Callable, dict[str, str]]:
  """The network on all devices, for batches on the host, and what made it."""
  import jax

  from moh_jax.convert import HOW_TO_GET_INCEPTION
  from moh_jax.convert.inception import load_inception
  from moh_jax.evaluation.image_metrics import make_extractor
  from moh_jax.models.inception import InceptionV3
  from moh_jax.models.registry import params_sha256
  from moh_jax.runtime import sharding

  if options.inception is None:
    raise ValueError(f"no --inception was given; {HOW_TO_GET_INCEPTION}")
  loaded = load_inception(options.inception)
  sharding.check_finite(loaded, f"parameters of {options.inception}")
  mesh = sharding.make_mesh(MeshConfig())
  params = jax.device_put(loaded, sharding.replicated(mesh))
  extract = make_extractor(InceptionV3(), options.resize)
  return (
    lambda batch: extract(params, sharding.shard_batch(batch, mesh)),
    {"resize": options.resize, "inception": params_sha256(loaded)},
  )
