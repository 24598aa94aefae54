"""Entry points: argument parsing, errors in one line, exit statuses.

Exit status: 0 success, 1 a failed check, 2 wrong use or bad input.
"""

import argparse
import functools
import importlib
import sys
import traceback as traceback_lib
from collections.abc import Callable, Sequence

import ml_collections
from absl import flags

from moh_jax import config as config_lib
from moh_jax.config.legacy import MOVED

# Command -> what it does. Each lives in the module of its name and has
# add_arguments(parser) and run(args) -> exit status; only the one that is
# called is imported.
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
  "sample": "draw images from a diffusion checkpoint",
  "tokenize": "turn text files into token sets to train a language model on",
  "train-tokenizer": "train a byte-level BPE tokenizer on text files",
  "tune-kernels": "measure the attention kernels' tiles on this GPU or TPU",
}
_USER_ERRORS = (ValueError, OSError, NotImplementedError)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m moh_jax COMMAND ...` and returns its exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  parser = argparse.ArgumentParser(
    prog="python -m moh_jax",
    description="Mixture-of-Head attention: convert, check and use models.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="commands:\n"
    + "\n".join(f"  {name:<16}{text}" for name, text in COMMANDS.items())
    + "\n\nTraining is `python train.py --help`.",
  )
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
  args = parser.parse_args(argv)
  module = importlib.import_module(
    f"moh_jax.cli.{args.command.replace('-', '_')}"
  )
  command = argparse.ArgumentParser(
    prog=f"python -m moh_jax {args.command}",
    description=COMMANDS[args.command].capitalize() + ".",
  )
  module.add_arguments(command)
  command.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )
  options = command.parse_args(args.arguments)
  return report_errors(lambda: module.run(options), options.traceback)


def report_errors(call: Callable[[], int], show_traceback: bool) -> int:
  """Runs a command, turning the user's mistakes into one line on stderr."""
  try:
    return call()
  except _USER_ERRORS as error:
    if show_traceback:
      traceback_lib.print_exc()
    else:
      text = " ".join(str(error).split()) or type(error).__name__
      print(f"error: {text}", file=sys.stderr)
    return 2


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses train.py's flags; wrong ones end it with one line and status 2."""
  if "--traceback" in argv:
    return flags.FLAGS(argv)
  try:
    return flags.FLAGS(argv)
  except (*_USER_ERRORS, flags.Error) as error:
    # A config file's own error comes with its traceback; its last line says it.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    wanted = lines[-1:] if "Traceback" in str(error) else lines
    text = " ".join(" ".join(wanted).split())
  except (AttributeError, LookupError) as error:  # of ml_collections
    key = str(error).strip("\"'")
    given = [arg for arg in argv if key and f".{key}" in arg.partition("=")[0]]
    text = f"unknown config key {given[0] if given else key!r}"
  flagged = [arg.partition("=")[0].removeprefix("--config.") for arg in argv]
  moved = [path for path in flagged if path in MOVED]
  text = config_lib.unknown_key(moved[0]) if moved else text
  print(f"error: {text}; see train.py --help", file=sys.stderr)
  sys.exit(2)


def train(
  config: ml_collections.ConfigDict,
  workdir: str,
  *,
  distributed: bool,
  json: str,
  vae: str,
  traceback: bool,
) -> None:
  """The body of train.py; exits with the command's status.

  Args:
    config: the parsed config file with its overrides.
    workdir: directory of checkpoints and metrics.
    distributed: join the run's other processes first.
    json: file for the final figures, "-" for stdout, "" for none.
    vae: weights of the autoencoder that shows samples of latents.
    traceback: show an error's traceback.
  """
  from moh_jax.cli import train as command  # JAX only once flags are parsed

  run = functools.partial(
    command.run,
    config,
    workdir,
    distributed=distributed,
    json=json,
    vae=vae,
  )
  sys.exit(report_errors(run, traceback))
