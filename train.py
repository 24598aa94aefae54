"""Trains a model: python train.py --config=FILE[:ARG] --workdir=DIR.

Every leaf of the config can be overridden (--config.optim.lr=3e-4). Run again
with the same arguments, it resumes from the last checkpoint.
"""

from absl import app, flags
from ml_collections import config_flags

from moh_jax.cli import main as cli

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, with an optional argument after a colon."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of checkpoints and metrics, local or a bucket."
)
_DISTRIBUTED = flags.DEFINE_bool(
  "distributed",
  False,
  "Join the other processes of the run: found by JAX on TPU pods, Slurm, Open "
  "MPI and Kubernetes, else given by JAX_COORDINATOR_ADDRESS (HOST:PORT), "
  "JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
)
_JSON = flags.DEFINE_string(
  "json", "", "Write the final figures to this file; '-' is stdout."
)
_VAE = flags.DEFINE_string(
  "vae", "", "Autoencoder weights that show samples of latent diffusion."
)
_TRACEBACK = flags.DEFINE_bool(
  "traceback", False, "Show the traceback of an error, not one line."
)


def main(_) -> None:
  """Runs the configured training."""
  cli.train(
    _CONFIG.value,
    _WORKDIR.value,
    distributed=_DISTRIBUTED.value,
    json=_JSON.value,
    vae=_VAE.value,
    traceback=_TRACEBACK.value,
  )


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main, flags_parser=cli.parse_flags)
