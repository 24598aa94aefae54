"""A small run of each family as a config file, `tiny_run.py:FAMILY`."""

import dataclasses
import time

import ml_collections

from moh_jax import config as config_lib
from moh_jax.training import feed
from tests.training import tiny

_MAKE = {
  "vit": (tiny.config, tiny.ALIKE["vit"]),
  "dit": (tiny.dit_config, tiny.ALIKE["dit"]),
  "llm": (tiny.llm_config, {}),
}


def get_config(name: str = "llm") -> ml_collections.ConfigDict:
  """The run of a family: saved each two steps, evaluated each three.

  Args:
    name: of the family; the run of "llm-waits" never gets its first batch.
  """
  family, _, waits = name.partition("-")
  if waits:
    feed.Feed.__next__ = lambda batches: time.sleep(600)
  make, model = _MAKE[family]
  config = make(
    train={"steps": 12},
    eval={"every": 3},
    model=model,
    mesh={"data": -1},
    optim={"schedule": "constant"},
  )
  if "sample" in config.sections:
    sample = dataclasses.replace(config.sections["sample"], every=4)
    config = dataclasses.replace(config, sample=sample)
  return config_lib.to_config_dict(config)
