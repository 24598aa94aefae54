"""`python -m moh_jax train`, and train.py."""

import argparse
import sys

from moh_jax.cli import common, distributed, run_log
from moh_jax.config import Config
from moh_jax.convert.vae import load_autoencoder
from moh_jax.data.infer import resolve, tell
from moh_jax.models.generation import Decode
from moh_jax.runtime import sharding
from moh_jax.training.flops import at_peak
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import train


def run(args: argparse.Namespace) -> int:
  """Trains and prints the final metrics.

  Returns:
    0 when all steps are done or a stop was asked for, 1 when the loss became
    NaN or infinite.
  """
  is_first = distributed.join(args)
  config = resolve(args.config)
  decode = read_decoder(args.vae, config)
  try:
    with run_log.kept(args.workdir, is_first, args.distributed):
      result = train(
        config,
        args.workdir,
        decode=decode,
        verify=args.verify,
        at_peak=at_peak,
      )
  except NonFiniteLossError as error:
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


def read_decoder(vae: str, config: Config) -> Decode | None:
  """Reads what turns a run's latents into images.

  Args:
    vae: autoencoder weights; "" for none.
    config: of the run.
  """
  if not vae:
    return None
  encoder = tell(config, ["encoder_sha256"]).get("encoder_sha256", "")
  mesh = sharding.make_mesh(config.mesh)
  return load_autoencoder(vae, config, mesh, encoder=encoder).decoder()
