"""`python -m moh_jax fid`."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import tqdm

from moh_jax.cli import common
from moh_jax.cli.arguments.images import METRICS
from moh_jax.config import MeshConfig
from moh_jax.convert import HOW_TO_GET_INCEPTION
from moh_jax.convert.inception import load_inception
from moh_jax.evaluation import fid
from moh_jax.evaluation.fid import Statistics, frechet_distance
from moh_jax.evaluation.image_metrics import (
  ImageSet,
  Summary,
  make_extractor,
  open_images,
  summarize,
)
from moh_jax.models import inception
from moh_jax.models.registry import params_sha256
from moh_jax.runtime import sharding
from moh_jax.runtime.files import npz_names

# Metric -> dimensions of the features whose distributions it compares.
_FRECHET = {"fid": inception.POOL_DIM, "sfid": inception.SPATIAL_DIM}


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


def run(args: argparse.Namespace) -> int:
  """Prints the metrics of the samples."""
  mesh = sharding.make_mesh(MeshConfig())
  sharding.check_batch("--batch-size", args.batch_size, mesh)
  sides = [_open("samples", args.samples, args.image_size)]
  if args.reference:
    sides.append(_open("reference", args.reference, args.image_size))
  names = args.metrics or _possible(sides, args.save_stats)
  if not args.reference and (needing := [m for m in names if m != "is"]):
    raise ValueError(
      f"--metrics {','.join(needing)} need --reference; without one only is"
    )
  passes = [(side, _wanted(side, names, args.save_stats)) for side in sides]
  for side, wanted in passes:
    _check(side, "sfid" in names, **wanted)
  if args.save_stats and os.path.isdir(args.save_stats):
    raise ValueError(f"--save-stats {args.save_stats} is a directory")
  extract, made_with = None, {}
  if any(any(wanted.values()) for _, wanted in passes):
    params = _network(args.inception)
    made_with = {"resize": args.resize, "inception": params_sha256(params)}
    extract = _extractor(params, args.resize, mesh)
  for side in sides:
    if side.statistics:
      made_with = made_with or side.statistics.made_with
      side.statistics.check_made_with(made_with, side.path)
  for side, wanted in passes:
    if wanted["distributions"]:
      _warn(side, names)
  results = [
    _summary(side, extract, args.batch_size, **wanted)
    for side, wanted in passes
  ]
  if args.save_stats:
    first = results[0]
    saved = Statistics(first.pool3, first.spatial, made_with)
    fid.write_statistics(args.save_stats, saved)
  metrics = {
    **_scores(names, *results),
    "samples": args.samples,
    "reference": args.reference,
    "num_samples": results[0].count or None,  # None: a file's statistics
    "num_reference": (results[1].count or None) if args.reference else None,
    "resize": args.resize,
  }
  common.report(args.json, metrics)
  return 0


def _open(name: str, path: str, image_size: int | None) -> _Side:
  """Checks one side; reads statistics, not images."""
  statistics, images = None, None
  if fid.has_statistics(path):
    sizes = inception.POOL_DIM, inception.SPATIAL_DIM
    statistics = fid.read_statistics(path, *sizes)
  if statistics is None or "arr_0" in npz_names(path):
    images = open_images(path, image_size)
  return _Side(name, path, images, statistics)


def _possible(sides: list[_Side], save_stats: str | None) -> tuple[str, ...]:
  """The metrics that the given files allow; says what is left out."""
  left_out = {}
  if len(sides) == 1:
    left_out = dict.fromkeys(("fid", "sfid", "pr"), "there is no --reference")
  for side in sides:
    if side.images is None:
      names = ("is", "pr") if side.name == "samples" else ("pr",)
      left_out |= dict.fromkeys(names, f"{side.path} holds no images")
    if side.statistics and side.statistics.spatial is None:
      reason = f"{side.path} holds no statistics of spatial features"
      left_out["sfid"] = reason
  metrics = tuple(name for name in METRICS if name not in left_out)
  if metrics or save_stats:
    for reason in dict.fromkeys(left_out.values()):
      names = ", ".join(n for n in left_out if left_out[n] == reason)
      print(f"note: without {names}: {reason}", file=sys.stderr)
  return metrics or METRICS


def _wanted(
  side: _Side, metrics: tuple[str, ...], save_stats: str | None
) -> dict[str, bool]:
  """What the images of one side go through the network for."""
  is_samples = side.name == "samples"
  compared = any(name in metrics for name in _FRECHET)
  saved = is_samples and bool(save_stats)
  return {
    "distributions": (compared or saved) and side.statistics is None,
    "score": is_samples and "is" in metrics,
    "keep_features": "pr" in metrics,
  }


def _check(
  side: _Side,
  spatial: bool,
  distributions: bool,
  score: bool,
  keep_features: bool,
) -> None:
  """Refuses what the side's files cannot give."""
  flag, images = f"--{side.name} {side.path}", side.images
  if (score or keep_features) and images is None:
    raise ValueError(
      f"{flag}: holds statistics alone; precision, recall and Inception "
      "Score need the images (arr_0)"
    )
  if keep_features:
    neighbours = fid.NEIGHBOURS
    fid.check_samples(images.count, neighbours, flag)
  statistics = side.statistics
  if statistics and statistics.spatial is None and spatial:
    raise ValueError(
      f"{flag}: holds mu and sigma alone, which serve fid; sfid needs mu_s and "
      "sigma_s too"
    )
  if distributions and images.count < 2:
    raise ValueError(f"{flag}: has one image; a covariance needs at least 2")


def _warn(side: _Side, metrics: tuple[str, ...]) -> None:
  """Says how many images are missing for covariances of full rank."""
  dims = {name: d for name, d in _FRECHET.items() if name in metrics}
  dims = dims or _FRECHET
  if side.images.count <= max(dims.values()):
    print(
      f"warning: {side.path}: {side.images.count} images give a singular "
      f"covariance; {' and '.join(dims)} need at least "
      f"{max(dims.values()) + 1}, and published numbers use 50000",
      file=sys.stderr,
    )


def _summary(
  side: _Side, extract: Callable | None, batch_size: int, **wanted: bool
) -> Summary:
  """The side's summary; the file's statistics where it states them."""
  summary = Summary()
  if any(wanted.values()):
    with tqdm.tqdm(
      total=side.images.count, desc=side.name, unit="image", disable=None
    ) as bar:
      summary = summarize(
        extract, side.images, batch_size, **wanted, progress=bar.update
      )
  if side.statistics:
    summary = dataclasses.replace(
      summary, pool3=side.statistics.pool3, spatial=side.statistics.spatial
    )
  return summary


def _network(path: str | None) -> Any:
  """Reads the parameters of the network."""
  if path is None or not os.path.exists(path):
    given = "no --inception was given" if path is None else f"no file {path}"
    raise FileNotFoundError(f"{given}; {HOW_TO_GET_INCEPTION}")
  return load_inception(path)


def _extractor(
  params: Any, resize: str, mesh: jax.sharding.Mesh
) -> Callable[[np.ndarray], inception.Features]:
  """The network on all devices, for batches on the host."""
  params = jax.device_put(params, sharding.replicated(mesh))
  extract = make_extractor(inception.InceptionV3(), resize)
  return lambda batch: extract(params, sharding.shard_batch(batch, mesh))


def _scores(
  metrics: tuple[str, ...], samples: Summary, reference: Summary | None = None
) -> dict[str, Any]:
  """All metrics; None for those that were not asked for."""
  names = "fid", "sfid", "inception_score", "precision", "recall"
  scores = dict.fromkeys(names)
  scores["inception_score"] = samples.inception_score
  if "fid" in metrics:
    scores["fid"] = frechet_distance(samples.pool3, reference.pool3)
  if "sfid" in metrics:
    scores["sfid"] = frechet_distance(samples.spatial, reference.spatial)
  if "pr" in metrics:
    both = samples.features, reference.features
    found = fid.precision_recall(*both)
    scores["precision"], scores["recall"] = found
  return scores
