"""Checkpoints small enough for tests of commands, and how to call these."""

import contextlib
import functools
import io
import json
import pathlib
import tempfile

from moh_jax import config as config_lib
from moh_jax.cli import main
from moh_jax.data.infer import resolve
from moh_jax.runtime import checkpoint
from tests import folders
from tests.inference import tiny_text_model, tiny_writer
from tests.models import small
from tests.training import tiny

CLASS_NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")
CONFIG = resolve(
  config_lib.Config(
    model=small.ONE_STAGE,
    data=config_lib.DataConfig(batch_size=8, fake_examples=20, num_threads=1),
    train=config_lib.TrainConfig(steps=2),
    eval=config_lib.EvalConfig(batch_size=8),
    log=config_lib.LogConfig(every=1, tensorboard=False),
  )
)
DIT_CONFIG = tiny.dit_config(mesh={"data": -1})
DIGITS = tuple("0123456789")  # its classes
# Of two runs of layers: one at an equal top_k.
TEXT_CONFIG = config_lib.apply_overrides(
  tiny_text_model.CONFIG, "model", top_k=(1, 2)
)
_FOLDER = tempfile.TemporaryDirectory()  # removed when the process ends


def save_random(directory, config, names=()):
  """Writes random parameters of a config as the checkpoint of step 0."""
  params = tiny.random_params(config)
  checkpoint.save_params(directory, params, checkpoint.Metadata(config, names))


SAVED = {
  "vit": functools.partial(save_random, config=CONFIG, names=CLASS_NAMES),
  "dit": functools.partial(save_random, config=DIT_CONFIG, names=DIGITS),
  "text": functools.partial(tiny_text_model.save, config=TEXT_CONFIG),
  "llm": tiny_writer.save_alphabet,  # writes the alphabet, "bB" after "aA"
}


@functools.cache
def stored(name):
  """The folder of one of `SAVED`, which tests only read."""
  folder = pathlib.Path(_FOLDER.name, name)
  SAVED[name](folder)
  return folder


def write_config(folder, config, module="moh_jax"):
  """Writes a config file that imports a module first; its path."""
  values, file = config_lib.to_dict(config), folder / "config.py"
  text = f"import {module}\n\ndef get_config():\n  return {values!r}\n"
  file.write_text(text)
  return file


def call(*argv, main=main.main):
  """Runs a command, or another program; its exit status, stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      status = main([str(arg) for arg in argv])
    except SystemExit as stop:  # argparse
      status = stop.code
  return status, out.getvalue(), err.getvalue()


def done(*argv):
  """Runs a command that must succeed; its stdout."""
  status, out, err = call(*argv)
  if status:
    raise AssertionError(f"{argv}: {err}")
  return out


class CommandTest(folders.FolderTest):
  """Calls a command.

  Attributes:
    COMMAND: the command and its first options; later ones overrule them.
    STORED: the checkpoint of `stored` that it reads.
  """

  COMMAND = ""
  STORED = ""

  def call(self, *argv):
    where = ("--checkpoint", stored(self.STORED)) if self.STORED else ()
    return call(*self.COMMAND.split(), *where, *argv)

  def done(self, *argv):
    status, out, err = self.call(*argv)
    self.assertEqual(status, 0, err)
    return out

  def report(self, *argv):
    """What it says with --json=-, which is nothing else."""
    return json.loads(self.done(*argv, "--json=-"))

  def assert_refused(self, message, *argv):
    """Checks that an error of one line says so; returns it."""
    status, out, err = self.call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertStartsWith(err, "error: ")
    self.assertIn(message, err)
    return err
