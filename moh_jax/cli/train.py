"""`python -m moh_jax train`, and train.py."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from moh_jax.cli import command
from moh_jax.config import Config, imported
from moh_jax.config.registry import get_source
from moh_jax.runtime import processes

if TYPE_CHECKING:
  from moh_jax.models.generation import Decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Workdir, command.Distributed, command.Output):
  """Train a model; run again, it resumes.

  Attributes:
    vae: autoencoder weights that show samples of latent diffusion.
  """

  vae: command.Place | None = None

  KEEPS_PROGRAMS = True  # a run that goes on, and what evaluates it


def run(options: Options) -> int:
  """Trains and prints the final metrics."""
  options.join()
  from moh_jax.cli import run_log
  from moh_jax.data.infer import resolve
  from moh_jax.training.train import train

  with run_log.kept(options):
    config = resolve(options.loaded)
    decode = read_decoder(options.vae, config)
    result = train(config, options.workdir, decode=decode)
  metrics = {**result.evaluation, "step": int(result.state.step)}
  lines = []
  if result.finished:
    shown = (f"{k} {command.cell(value)}" for k, value in metrics.items())
    lines += [f"held-out: {', '.join(shown)}"] if result.evaluation else []
    lines += [f"checkpoint: {options.workdir}"]
  options.give(metrics, lines)
  return 0 if result.finished else processes.stop_status()


def read_decoder(vae: str | None, config: Config) -> Decode | None:
  """Reads what turns a run's latents into images.

  Args:
    vae: autoencoder weights, if there are any.
    config: of the run.
  """
  from moh_jax.convert.vae import load_autoencoder
  from moh_jax.runtime.mesh import make_mesh

  if not vae:
    return None
  source = imported(get_source(config.data).source)
  told = source.tell(config, ["encoder_sha256"])
  mesh = make_mesh(config.mesh)
  encoder = told.get("encoder_sha256", "")
  return load_autoencoder(vae, config, mesh, encoder=encoder).decode
