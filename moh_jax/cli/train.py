"""The training command behind train.py."""

import sys

import ml_collections
from absl import logging

from moh_jax import config as config_lib
from moh_jax.cli.common import write_json
from moh_jax.training import loop


def run(cfg: ml_collections.ConfigDict, workdir: str, json: str) -> int:
  """Trains and prints the final figures.

  Args:
    cfg: the config with its overrides.
    workdir: directory of checkpoints and metrics.
    json: file for the final figures, "-" for stdout, "" for none.

  Returns:
    0 when all steps are done or a stop was asked for, 1 when the loss became
    NaN or infinite.
  """
  logging.set_verbosity(logging.INFO)
  logging.get_absl_logger().setLevel(logging.INFO)
  config = config_lib.from_config_dict(cfg)
  try:
    result = loop.train(config, workdir)
  except loop.NonFiniteLossError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  figures = {**result.evaluation, "step": int(result.state.step)}
  write_json(json, figures)
  if result.finished and json != "-":
    shown = ", ".join(
      f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
      for name, value in figures.items()
    )
    print(f"held-out: {shown}")
    print(f"checkpoint: {workdir}")
  return 0
