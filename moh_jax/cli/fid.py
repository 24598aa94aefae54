"""`python -m moh_jax fid`."""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from moh_jax.cli import common
from moh_jax.cli.arguments.fid import METRICS
from moh_jax.config import MeshConfig
from moh_jax.convert.downloads import HOW_TO_GET_INCEPTION
from moh_jax.convert.inception import load_inception
from moh_jax.evaluation.fid import frechet_distance
from moh_jax.evaluation.image_metrics import Summary, make_extractor, summarize
from moh_jax.evaluation.image_sets import ImageSet, npz_names, open_images
from moh_jax.evaluation.precision_recall import (
  NEIGHBOURS,
  check_samples,
  precision_recall,
)
from moh_jax.evaluation.statistics import Gaussian
from moh_jax.evaluation.statistics_files import (
  check_writable,
  has_statistics,
  read_statistics,
  write_statistics,
)
from moh_jax.models.inception import (
  POOL_DIM,
  SPATIAL_DIM,
  Features,
  InceptionV3,
)
from moh_jax.runtime import sharding

_FRECHET = {"fid": POOL_DIM, "sfid": SPATIAL_DIM}


@dataclasses.dataclass(frozen=True)
class _Side:
  """The samples or the reference, checked and not yet read.

  Attributes:
    path: as given.
    images: None for a file of statistics alone.
    statistics: (pool3, spatial) that the file states.
  """

  path: str
  images: ImageSet | None
  statistics: tuple[Gaussian, Gaussian] | None


def run(args: argparse.Namespace) -> int:
  """Prints the metrics of the samples."""
  if args.batch_size < 1:
    raise ValueError(f"--batch-size={args.batch_size} must be at least 1")
  mesh = sharding.make_mesh(MeshConfig())
  sharding.check_batch("--batch-size", args.batch_size, mesh)
  samples = _open(args.samples)
  reference = _open(args.reference) if args.reference else None
  names = args.metrics or _possible(samples, reference, args.save_stats)
  if reference is None and (needing := [m for m in names if m != "is"]):
    raise ValueError(
      f"--metrics {','.join(needing)} need --reference; without one only is"
    )
  passes = [_Pass("samples", samples, names, saved=bool(args.save_stats))]
  if reference is not None:
    passes.append(_Pass("reference", reference, names))
  for one in passes:
    one.check()
  for target in (args.save_stats, args.json):
    if target and target != "-":
      check_writable(target)
  extract = None
  if any(one.needed for one in passes):
    extract = _extractor(args.inception, args.resize, mesh)
  for one in passes:
    one.warn()
  results = [one.run(extract, args.batch_size) for one in passes]
  if args.save_stats:
    write_statistics(args.save_stats, results[0].pool3, results[0].spatial)
  metrics = {
    **_scores(names, *results),
    "samples": args.samples,
    "reference": args.reference,
    "num_samples": results[0].count or None,  # None: a file's statistics
    "num_reference": (results[1].count or None) if reference else None,
    "resize": args.resize,
  }
  common.report(args.json, metrics)
  return 0


@dataclasses.dataclass(frozen=True)
class _Pass:
  """What one side has to go through the network for."""

  name: str
  side: _Side
  metrics: tuple[str, ...]
  saved: bool = False

  @property
  def distributions(self) -> bool:
    wanted = self.saved or any(m in self.metrics for m in _FRECHET)
    return wanted and self.side.statistics is None

  @property
  def score(self) -> bool:
    return self.name == "samples" and "is" in self.metrics

  @property
  def features(self) -> bool:
    return "pr" in self.metrics

  @property
  def needed(self) -> bool:
    return self.distributions or self.score or self.features

  def check(self) -> None:
    """Refuses what the side's files cannot give."""
    flag, images = f"--{self.name} {self.side.path}", self.side.images
    if (self.score or self.features) and images is None:
      raise ValueError(
        f"{flag}: holds statistics alone; precision, recall and Inception "
        "Score need the images (arr_0)"
      )
    if self.features:
      check_samples(len(images), NEIGHBOURS, flag)
    if self.distributions and len(images) < 2:
      raise ValueError(f"{flag}: has one image; a covariance needs at least 2")

  def warn(self) -> None:
    """Says how many images are missing for covariances of full rank."""
    if not self.distributions:
      return
    dims = {name: d for name, d in _FRECHET.items() if name in self.metrics}
    dims = dims or _FRECHET
    if len(self.side.images) <= max(dims.values()):
      print(
        f"warning: {self.side.path}: {len(self.side.images)} images give a "
        f"singular covariance; {' and '.join(dims)} need at least "
        f"{max(dims.values()) + 1}, and published numbers use 50000",
        file=sys.stderr,
      )

  def run(self, extract: Callable | None, batch_size: int) -> Summary:
    """The side's summary; the file's statistics where it states them."""
    images, stated = self.side.images, self.side.statistics or (None, None)
    if not self.needed:
      return Summary(0, *stated, None, None)
    with tqdm.tqdm(
      total=len(images), desc=self.name, unit="image", file=sys.stderr
    ) as bar:
      summary = summarize(
        extract,
        images,
        batch_size,
        distributions=self.distributions,
        score=self.score,
        keep_features=self.features,
        progress=bar.update,
      )
    if self.side.statistics:
      pool3, spatial = self.side.statistics
      return dataclasses.replace(summary, pool3=pool3, spatial=spatial)
    return summary


def _open(path: str) -> _Side:
  """Checks one side; reads statistics, not images."""
  statistics, images = None, None
  if has_statistics(path):
    statistics = read_statistics(path, POOL_DIM, SPATIAL_DIM)
  if statistics is None or "arr_0" in npz_names(path):
    images = open_images(path)
  return _Side(path, images, statistics)


def _possible(
  samples: _Side, reference: _Side | None, save_stats: str | None
) -> tuple[str, ...]:
  """The metrics that the given files allow; says what is left out."""
  left_out = {}
  if reference is None:
    left_out = dict.fromkeys(("fid", "sfid", "pr"), "there is no --reference")
  for side in (samples, reference):
    if side is not None and side.images is None:
      names = ("is", "pr") if side is samples else ("pr",)
      left_out |= dict.fromkeys(names, f"{side.path} holds no images")
  metrics = tuple(name for name in METRICS if name not in left_out)
  if metrics or save_stats:
    for reason in dict.fromkeys(left_out.values()):
      names = ", ".join(n for n in left_out if left_out[n] == reason)
      print(f"note: without {names}: {reason}", file=sys.stderr)
  return metrics or METRICS


def _extractor(
  path: str | None, resize: str, mesh: jax.sharding.Mesh
) -> Callable[[np.ndarray], Features]:
  """The network on all devices, for batches on the host."""
  if path is None or not os.path.exists(path):
    given = "no --inception was given" if path is None else f"no file {path}"
    raise FileNotFoundError(f"{given}; {HOW_TO_GET_INCEPTION}")
  params = jax.device_put(load_inception(path), sharding.replicated(mesh))
  extract = functools.partial(make_extractor(InceptionV3(), resize), params)
  return lambda batch: extract(sharding.shard_batch(batch, mesh))


def _scores(
  metrics: tuple[str, ...], samples: Summary, reference: Summary | None = None
) -> dict[str, Any]:
  """All metrics; None for those that were not asked for."""
  fid = sfid = precision = recall = None
  if "fid" in metrics:
    fid = frechet_distance(samples.pool3, reference.pool3)
  if "sfid" in metrics:
    sfid = frechet_distance(samples.spatial, reference.spatial)
  if "pr" in metrics:
    precision, recall = precision_recall(samples.features, reference.features)
  return {
    "fid": fid,
    "sfid": sfid,
    "inception_score": samples.inception_score,
    "precision": precision,
    "recall": recall,
  }
