"""`python -m moh_jax train`, and train.py."""

import argparse
import logging
import sys

from moh_jax.cli import common, distributed, run_log
from moh_jax.config import Config
from moh_jax.convert.decoder import load_autoencoder
from moh_jax.data.images.latents import LatentSource
from moh_jax.data.infer import resolve
from moh_jax.runtime import sharding
from moh_jax.speed.model_flops import at_peak
from moh_jax.training import loop


def run(args: argparse.Namespace) -> int:
  """Trains and prints the final metrics.

  Returns:
    0 when all steps are done or a stop was asked for, 1 when the loss became
    NaN or infinite.
  """
  is_first = distributed.join(args)
  config = resolve(args.config)
  decode = None
  level = logging.INFO if is_first else logging.WARNING
  if args.vae:
    mesh = sharding.make_mesh(config.mesh)
    vae = load_autoencoder(args.vae, config, mesh, encoder=_encoder(config))
    decode = vae.decoder()
  try:
    with run_log.kept(args.workdir, level, args.distributed):
      result = loop.train(
        config,
        args.workdir,
        decode=decode,
        verify=args.verify,
        at_peak=at_peak,
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


def _encoder(config: Config) -> str:
  """Hash of the encoder that made the latents to train on, "" if unknown."""
  if config.data.source != "latents":
    return ""
  return LatentSource(config.data.path, "train").encoder_sha256
