"""Entry points: argument parsing, errors in one line, exit statuses.

Exit status: 0 success, 1 a failed check, 2 wrong use or bad input. JAX takes
seconds to import, so help and what can be refused without it come first.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import sys
import traceback as traceback_lib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from moh_jax.cli import common
from moh_jax.cli.arguments import COMMANDS
from moh_jax.cli.overrides import split_overrides
from moh_jax.config import reference
from moh_jax.runtime import compilation_cache, signals

_USER_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError)
_FULL = "RESOURCE_EXHAUSTED"  # how XLA says that memory is full
_LESS = (
  "; a smaller batch needs less (of a run: data.batch_size, or "
  "optim.accumulation for parts of it, and model.remat)"
)
_HELP = {"-h", "--help"}


class _Parser(argparse.ArgumentParser):
  """A parser whose errors are one line."""

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m moh_jax COMMAND ...` and returns its exit status."""
  # Names that the terminal cannot show must not end a command.
  with contextlib.suppress(AttributeError):  # stdout may be a notebook's
    sys.stdout.reconfigure(errors="backslashreplace")
  imports = _Parser(add_help=False, allow_abbrev=False)
  imports.add_argument(
    "--import",
    dest="modules",
    action="append",
    default=[],
    metavar="MODULE",
    help="import a module first, such as one that registers a family",
  )
  parser = _Parser(
    prog="python -m moh_jax",
    parents=[imports],
    description="Mixture-of-Head attention: train, convert and use models.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="commands:\n"
    + "\n".join(
      f"  {name:<16}{inspect.getdoc(options)}"
      for name, options in COMMANDS.items()
    ),
  )
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
  given, argv = imports.parse_known_args(argv)
  args = parser.parse_args(argv)
  return report_errors(
    lambda: _run(args.command, args.arguments, given.modules),
    "--traceback" in args.arguments,
  )


def run_process(argv: Sequence[str] | None = None) -> NoReturn:
  """Runs a command as the whole of this process and ends it.

  What libraries warn their callers of, such as a deprecation, is nothing that
  a user of a command could change; `python -W default` shows it. After an error
  the process ends at once: threads of libraries may wait for ever for what has
  failed, and the processes of a run for one another.
  """
  if not sys.warnoptions:
    warnings.simplefilter("ignore")
  status = main(argv)
  if status:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
  sys.exit(status)


def _run(name: str, argv: Sequence[str], modules: Sequence[str]) -> int:
  """Parses a command's arguments, checks its inputs and runs it."""
  for module in modules:
    try:
      importlib.import_module(module)
    except ImportError as error:
      raise ValueError(
        f"--import {module}: {error}; it takes a name as `import` does"
      ) from error
  command = _Parser(
    prog=f"python -m moh_jax {name}",
    description=inspect.getdoc(COMMANDS[name]),
    allow_abbrev=False,
  )
  COMMANDS[name](command)
  command.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )
  argv, overrides = split_overrides(argv)
  config = _given_config(argv)
  if config and _HELP.intersection(argv):
    command.print_help()
    print(f"\n{reference.describe(common.load_config(config, overrides))}")
    return 0
  options, unknown = command.parse_known_args(argv)
  if unknown:
    command.error(
      f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown)}"
    )
  common.read_inputs(options, overrides)
  given = vars(options)
  # Several processes would wait for one another's lock on a shared disk.
  if given.get("compilation_cache") and not given.get("distributed"):
    compilation_cache.enable()
  module = importlib.import_module(f"moh_jax.cli.{name.replace('-', '_')}")
  with _plain_warnings():
    return module.run(options)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
  """Shows our warnings without prefix, whatever libraries add to the root.

  Handlers that our logger has, as in programs that call `main`, stay.
  """
  ours = logging.getLogger("moh_jax")
  before = ours.handlers, ours.propagate
  if not ours.handlers:
    ours.handlers, ours.propagate = [logging.lastResort], False
  try:
    yield
  finally:
    ours.handlers, ours.propagate = before


def _meant(unknown: Sequence[str]) -> str:
  """A hint where an override lacks its prefix."""
  for argument in unknown:
    key = argument.lstrip("-").removeprefix("config.")
    if "." in key.partition("=")[0]:
      return f"; did you mean --config.{key}?"
  return ""


def _given_config(argv: Sequence[str]) -> str | None:
  """The value of --config, whatever else is missing."""
  parser = _Parser(add_help=False, allow_abbrev=False)
  parser.add_argument("--config")
  return parser.parse_known_args(argv)[0].config


def report_errors(call: Callable[[], int], show_traceback: bool) -> int:
  """Runs a command, turning the user's mistakes into one line on stderr."""
  try:
    with signals.handled():
      return call()
  except signals.StoppedError as stopped:
    print(f"error: {stopped}", file=sys.stderr)
    return stopped.status
  except BrokenPipeError:  # the reader of stdout has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except Exception as error:
    if not isinstance(error, _USER_ERRORS) and _FULL not in str(error):
      raise
    if show_traceback:
      traceback_lib.print_exc()
    else:
      text = " ".join(str(error).split()) or type(error).__name__
      if _FULL in text:
        text += _LESS
      print(f"error: {text}", file=sys.stderr)
    return 2
