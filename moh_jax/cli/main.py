"""Entry points: argument parsing, errors in one line, exit statuses.

Exit status: 0 success, 1 a failed check, 2 wrong use or bad input. JAX takes
seconds to import, so help and what can be refused without it come first.
"""

import argparse
import importlib
import os
import sys
import traceback as traceback_lib
from collections.abc import Callable, Sequence
from typing import NoReturn

from moh_jax.cli import common
from moh_jax.config import reference

# Command -> what it does. Its options are in the module of its name in
# `cli/arguments`, its `run(args) -> exit status` in that in `cli`.
COMMANDS = {
  "bench": "time forms of attention, layers, decoding and models",
  "classify": "name what image files show",
  "convert": "turn a public checkpoint into one of ours",
  "encode-latents": "turn images into latents to train a diffusion model on",
  "evaluate": "score a checkpoint on its held-out data",
  "evaluate-lm": "score a language model on the harness's tasks or on text",
  "export": "turn a checkpoint into public tensor names",
  "fid": "score images: FID, sFID, Inception Score, precision, recall",
  "generate": "write on from a prompt with a language model",
  "heads": "measure what each head of a language model is worth",
  "inspect": "describe a checkpoint or config: heads, parameters, sizes",
  "pack-images": "pack folders of images into array_record shards",
  "parity": "compare our numbers with recorded cases",
  "sample": "sample images from a diffusion checkpoint",
  "tokenize": "turn text files into token sets to train a language model on",
  "train": "train a model; run again, it resumes",
  "train-tokenizer": "train a byte-level BPE tokenizer on text files",
  "tune-kernels": "measure the attention kernels' tiles on this GPU or TPU",
}
_USER_ERRORS = (ValueError, OSError, NotImplementedError)
_HELP = {"-h", "--help"}


class _Parser(argparse.ArgumentParser):
  """A parser whose errors are one line."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m moh_jax COMMAND ...` and returns its exit status."""
  parser = _Parser(
    prog="python -m moh_jax",
    description="Mixture-of-Head attention: train, convert and use models.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="commands:\n"
    + "\n".join(f"  {name:<16}{text}" for name, text in COMMANDS.items()),
  )
  parser.add_argument(
    "--import",
    dest="modules",
    action="append",
    default=[],
    metavar="MODULE",
    help="import a module first, such as one that registers a family",
  )
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
  args = parser.parse_args(argv)
  return report_errors(
    lambda: _run(args.command, args.arguments, args.modules),
    "--traceback" in args.arguments,
  )


def _run(name: str, argv: Sequence[str], modules: Sequence[str]) -> int:
  """Parses a command's arguments, checks its inputs and runs it."""
  for module in modules:
    try:
      importlib.import_module(module)
    except ImportError as error:
      raise ValueError(f"--import {module}: {error}") from error
  command = _Parser(
    prog=f"python -m moh_jax {name}",
    description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
    allow_abbrev=False,
  )
  module = name.replace("-", "_")
  importlib.import_module(f"moh_jax.cli.arguments.{module}").add_arguments(
    command
  )
  command.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )
  argv, overrides = common.split_overrides(argv)
  config = _given_config(argv)
  if config and _HELP.intersection(argv):
    command.print_help()
    print(f"\n{reference.describe(common.load_config(config, overrides))}")
    return 0
  options = command.parse_args(argv)
  common.read_inputs(options, overrides)
  return importlib.import_module(f"moh_jax.cli.{module}").run(options)


def _given_config(argv: Sequence[str]) -> str | None:
  """The value of --config, whatever else is missing."""
  parser = _Parser(add_help=False, allow_abbrev=False)
  parser.add_argument("--config")
  return parser.parse_known_args(argv)[0].config


def report_errors(call: Callable[[], int], show_traceback: bool) -> int:
  """Runs a command, turning the user's mistakes into one line on stderr."""
  try:
    return call()
  except BrokenPipeError:  # the reader of stdout has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except _USER_ERRORS as error:
    if show_traceback:
      traceback_lib.print_exc()
    else:
      text = " ".join(str(error).split()) or type(error).__name__
      print(f"error: {text}", file=sys.stderr)
    return 2
