"""A checkpoint small enough for tests of the commands, and how to call them."""

import contextlib
import io

import jax
import numpy as np

from moh_jax import config as config_lib
from moh_jax.cli import main
from moh_jax.data.infer import resolve
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.sharding import abstract_params, unbox
from tests.models import small
from tests.training import tiny

CLASS_NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")
CONFIG = resolve(
  config_lib.Config(
    model=small.ONE_STAGE,
    data=config_lib.DataConfig(batch_size=8, fake_examples=20, num_threads=1),
    train=config_lib.TrainConfig(steps=2),
    checkpoint=config_lib.CheckpointConfig(async_save=False),
    eval=config_lib.EvalConfig(batch_size=8),
    log=config_lib.LogConfig(every=1, tensorboard=False, progress=False),
  )
)
# Of handwritten digits, classes "0" to "9".
DIT_CONFIG = tiny.dit_config(mesh={"data": -1})


def save(directory):
  """Writes random parameters of `CONFIG` as the checkpoint of step 0."""
  model, inputs = make_model(CONFIG)
  rng = np.random.RandomState(0)
  params = jax.tree.map(
    lambda leaf: np.float32(rng.normal(0, 0.5, leaf.shape)),
    unbox(abstract_params(model, inputs)),
  )
  metadata = checkpoint.Metadata(CONFIG, CLASS_NAMES)
  checkpoint.save_params(directory, params, metadata)


def save_dit(directory):
  """Writes random parameters of `DIT_CONFIG`, likewise."""
  metadata = checkpoint.Metadata(DIT_CONFIG, tuple("0123456789"))
  checkpoint.save_params(directory, tiny.random_params(DIT_CONFIG), metadata)


def call(*argv):
  """Runs a command; its exit status, stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      status = main.main([str(arg) for arg in argv])
    except SystemExit as stop:  # argparse
      status = stop.code
  return status, out.getvalue(), err.getvalue()


def done(*argv):
  """Runs a command that must succeed; its stdout."""
  status, out, err = call(*argv)
  if status:
    raise AssertionError(f"{argv}: {err}")
  return out
