"""The training command behind train.py."""

import logging
import sys

import jax
import ml_collections
from absl import logging as absl_logging

from moh_jax import config as config_lib
from moh_jax.cli.common import write_json
from moh_jax.cli.processes import join_processes
from moh_jax.convert.decoder import load_decoder
from moh_jax.data.infer import resolve
from moh_jax.runtime import sharding
from moh_jax.training import loop


def run(
  cfg: ml_collections.ConfigDict,
  workdir: str,
  *,
  distributed: bool = False,
  json: str = "",
  vae: str = "",
) -> int:
  """Trains and prints the final figures.

  Args:
    cfg: the config with its overrides.
    workdir: directory of checkpoints and metrics.
    distributed: join the run's other processes first.
    json: file for the final figures, "-" for stdout, "" for none.
    vae: weights of the autoencoder that shows samples of latents.

  Returns:
    0 when all steps are done or a stop was asked for, 1 when the loss became
    NaN or infinite.
  """
  # Our own notes, not those of the checkpoint library.
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.getLogger("moh_jax").setLevel(logging.INFO)
  config = config_lib.from_config_dict(cfg)
  if distributed:
    join_processes()
  config = resolve(config)
  try:
    decode = None
    if vae:
      decode = load_decoder(vae, config, sharding.make_mesh(config.mesh))
    result = loop.train(config, workdir, decode=decode)
  except loop.NonFiniteLossError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  figures = {**result.evaluation, "step": int(result.state.step)}
  if jax.process_index() == 0:
    write_json(json, figures)
    if result.finished and json != "-":
      shown = ", ".join(
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
      )
      if result.evaluation:
        print(f"held-out: {shown}")
      print(f"checkpoint: {workdir}")
  return 0
