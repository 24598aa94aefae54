"""`python -m moh_jax fid`."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Literal

from moh_jax.cli import command
from moh_jax.config import MeshConfig
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive

_BATCH = 32  # images of a device


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
    metrics: of fid, sfid, is, pr (default: all that --reference serves).
    resize: how images become 299 pixels wide: tf1 as for ADM's and DiT's
      numbers, ptfid as pytorch-fid.
    image_size: crop the images of folders to so many rows and columns, as in
      training of diffusion models (default: all must have one size).
    save_stats: write the statistics of the samples as a reference file.
  """

  samples: command.InPath
  reference: command.InPath | None = None
  inception: command.Place
  metrics: tuple[Literal["fid", "sfid", "is", "pr"], ...] = ()
  resize: Literal["tf1", "ptfid"] = "tf1"
  image_size: Count | None = None
  save_stats: command.OutFile | None = None

  def check(self) -> None:
    """What compares has a reference."""
    super().check()
    if set(self.metrics) - {"is"} and not self.reference:
      self.fail("metrics", "need --reference; without one only is")


@alive("scoring images")
def run(options: Options) -> int:
  """Prints the metrics of the samples."""
  from moh_jax.evaluation import fid

  names, stated = options.metrics or ("is",), None
  if options.reference:
    stated, lacks = fid.read_statistics(options.reference), {}
    if stated and stated.spatial is None:
      lacks["sfid"] = "mu_s and sigma_s"
    if stated and not fid.has_images(options.reference):
      lacks["pr"] = "images (arr_0)"
    served = [n for n in ("fid", "sfid", "is", "pr") if n not in lacks]
    names = options.metrics or served
    for name in lacks.keys() & {*names}:
      options.fail("metrics", f"needs {lacks[name]} in {options.reference}")
  keep = "pr" in names
  summary = _summarized(options, options.samples, keep)
  if options.save_stats:
    fid.write_statistics(options.save_stats, summary.statistics)
  metrics = (
    {"inception_score": summary.inception_score} if "is" in names else {}
  )
  if set(names) - {"is"}:
    other = None
    if keep or not stated:
      other = _summarized(options, options.reference, keep)
    (pool3, spatial), theirs = summary.statistics, stated or other.statistics
    if "fid" in names:
      metrics["fid"] = fid.frechet_distance(pool3, theirs.pool3)
    if "sfid" in names:
      metrics["sfid"] = fid.frechet_distance(spatial, theirs.spatial)
    if keep:
      both = summary.features, other.features
      metrics["precision"], metrics["recall"] = fid.precision_recall(*both)
  values = {**metrics, "samples": options.samples, "resize": options.resize}
  if options.reference:
    values["reference"] = options.reference
  options.give(values, command.metric_lines(values))
  return 0


def _summarized(options: Options, path: str, keep: bool) -> Any:
  """The `fid.Summary` of a set of images; warns where it is small."""
  import jax

  from moh_jax.evaluation import fid
  from moh_jax.models import inception

  extract = _extractor(options.inception, options.resize)
  images = fid.open_images(path, options.image_size)
  if images.count <= inception.POOL_DIM:
    print(
      f"warning: {path}: {images.count} images give a singular covariance; "
      f"more than {inception.POOL_DIM} do not, published numbers use 50000",
      file=sys.stderr,
    )
  devices = jax.device_count()
  size = devices * min(_BATCH, -(-images.count // devices))
  return fid.summarize(extract, images, size, keep=keep)


@functools.cache
def _extractor(path: str, resize: str) -> Callable:
  """The network on all devices, for batches on the host."""
  import jax

  from moh_jax.convert.inception import load_inception
  from moh_jax.models.inception import InceptionV3, prepare
  from moh_jax.runtime.batches import shard_batch
  from moh_jax.runtime.mesh import make_mesh, replicated

  mesh = make_mesh(MeshConfig())
  params = jax.device_put(load_inception(path), replicated(mesh))

  @jax.jit
  def extract(params, images):
    return InceptionV3().apply({"params": params}, prepare(images, resize))

  return lambda batch: extract(params, shard_batch(batch, mesh))
