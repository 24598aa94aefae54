"""`python -m moh_jax train`, and train.py."""

import argparse
import logging
import sys

import jax

from moh_jax.cli import common, distributed, run_log
from moh_jax.config import Config
from moh_jax.convert.decoder import load_autoencoder
from moh_jax.convert.inception import load_inception
from moh_jax.data.images.latents import LatentSource
from moh_jax.data.infer import resolve
from moh_jax.evaluation.image_metrics import make_extractor
from moh_jax.evaluation.statistics_files import read_statistics
from moh_jax.models import inception
from moh_jax.models.generation import Decode
from moh_jax.models.weights_hash import params_sha256
from moh_jax.runtime import sharding
from moh_jax.speed.model_flops import at_peak
from moh_jax.training import loop
from moh_jax.training.sampled_fid import make_fid
from moh_jax.training.task import Evaluate


def run(args: argparse.Namespace) -> int:
  """Trains and prints the final metrics.

  Returns:
    0 when all steps are done or a stop was asked for, 1 when the loss became
    NaN or infinite.
  """
  is_first = distributed.join(args)
  config = resolve(args.config)
  decode = score = None
  mesh = sharding.make_mesh(config.mesh)
  level = logging.INFO if is_first else logging.WARNING
  if args.vae:
    vae = load_autoencoder(args.vae, config, mesh, encoder=_encoder(config))
    decode = vae.decoder()
  if getattr(config.sections.get("sample"), "fid_images", 0):
    score = _fid(config, mesh, decode)
  try:
    with run_log.kept(args.workdir, level, args.distributed):
      result = loop.train(
        config,
        args.workdir,
        decode=decode,
        verify=args.verify,
        at_peak=at_peak,
        score=score,
      )
  except loop.NonFiniteLossError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  metrics = {**result.evaluation, "step": int(result.state.step)}
  if is_first:
    common.write_json(args.json, metrics)
    if result.finished and args.json != "-":
      shown = ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
      )
      if result.evaluation:
        print(f"held-out: {shown}")
      print(f"checkpoint: {args.workdir}")
  return 0


def _fid(
  config: Config, mesh: jax.sharding.Mesh, decode: Decode | None
) -> Evaluate:
  """The metric "fid" of a run, with the files that `sample` names."""
  sample = config.sample
  sizes = inception.POOL_DIM, inception.SPATIAL_DIM
  reference = read_statistics(sample.fid_reference, *sizes)
  params = load_inception(sample.fid_inception)
  made_with = {"resize": sample.fid_resize, "inception": params_sha256(params)}
  reference.check_made_with(made_with, sample.fid_reference)
  params = jax.device_put(params, sharding.replicated(mesh))
  extract = make_extractor(inception.InceptionV3(), sample.fid_resize)
  return make_fid(
    config,
    reference.pool3,
    lambda images: extract(params, images).pool3,
    decode,
  )


def _encoder(config: Config) -> str:
  """Hash of the encoder that made the latents to train on, "" if unknown."""
  if config.data.source != "latents":
    return ""
  return LatentSource(config.data.path, "train").encoder_sha256
