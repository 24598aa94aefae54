"""Weights & Biases as a further place for metrics; optional."""

import hashlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from moh_jax.config import LogConfig


def check(config: LogConfig) -> None:
  """Checks that the package is there if it is asked for.

  Raises:
    ValueError: it is not.
  """
  if config.wandb and importlib.util.find_spec("wandb") is None:
    raise ValueError(
      f"log.wandb={config.wandb!r} needs the package wandb: "
      "pip install 'moh_jax[wandb]'"
    )


class WandbLog:
  """The run of a workdir in a project; a resumed run goes on with it.

  WANDB_MODE=offline keeps it in WORKDIR/wandb (`wandb sync` sends it).
  """

  def __init__(self, project: str, workdir: epath.Path, run: Mapping[str, Any]):
    """Begins or continues it.

    Args:
      project: name of the project.
      workdir: the run's directory, which names it.
      run: config of the run.
    """
    import wandb

    name = os.fspath(workdir)
    in_bucket = "://" in name
    self._run = wandb.init(
      project=project,
      id=hashlib.sha256(name.encode()).hexdigest()[:16],
      name=workdir.name,
      dir=None if in_bucket else name,
      config=dict(run),
      resume="allow",
    )
    self._run.define_metric("*", step_metric="step")

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records scalars of a step."""
    named = {f"{split}/{name}": value for name, value in values.items()}
    self._run.log({"step": step, **named})

  def write_images(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
    """Records pictures [rows, columns, 1 or 3] uint8 of a step."""
    import wandb

    images = {name: wandb.Image(pixels) for name, pixels in pictures.items()}
    self._run.log({"step": step, **images})

  def close(self) -> None:
    """Sends or writes what is left."""
    self._run.finish()
