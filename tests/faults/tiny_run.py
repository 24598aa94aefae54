"""A small run of each family as a config file, `tiny_run.py:FAMILY`."""

import time

import ml_collections

from moh_jax import config as config_lib
from moh_jax.data.pipeline import TrainBatches
from tests.training import tiny


def get_config(name: str = "llm") -> ml_collections.ConfigDict:
  """The run of a family: saved each two steps, evaluated each three.

  Args:
    name: of the family; the run of "llm-waits" never gets its first batch.
  """
  family, _, waits = name.partition("-")
  if waits:
    TrainBatches.__next__ = lambda batches: time.sleep(600)
  pictures = {"sample": {"every": 4}} if family == "dit" else {}
  config = tiny.CONFIGS[family](
    train={"steps": 12},
    eval={"every": 3},
    model=tiny.ALIKE[family],
    mesh={"data": -1},
    optim={"schedule": "constant"},
    **pictures,
  )
  return config_lib.to_config_dict(config)
