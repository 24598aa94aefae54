"""Entry points: argument parsing, errors in one line, exit statuses.

Exit status: 0 success, 1 a failed check or NaN, 2 wrong use or bad input. JAX
takes seconds to import, so help and what can be refused without it come first.
"""

import argparse
import contextlib
import importlib
import inspect
import logging
import os
import pathlib
import re
import sys
import traceback as traceback_lib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from moh_jax._version import __version__
from moh_jax.cli import command, flags
from moh_jax.cli.flags import Parser
from moh_jax.config import reference, registry
from moh_jax.config.base import MistakesError
from moh_jax.runtime import compilation_cache, files, processes, steps

# Commands, each a module of this folder; see `options`.
COMMANDS = (
  "bench",
  "classify",
  "compare",
  "convert",
  "evaluate",
  "export",
  "fid",
  "generate",
  "heads",
  "inspect",
  "plan",
  "prepare",
  "sample",
  "train",
)
_USER_ERRORS = (
  ValueError,
  OSError,
  NotImplementedError,
  MemoryError,
  FloatingPointError,  # NaN
)
_FULL = "RESOURCE_EXHAUSTED"  # how XLA says that memory is full
_NO_SPACE, _PLACE = "No space left on device", re.compile(r'"(/[^"]+)"')
_NO_DEVICE = ("Unable to initialize backend", "Unknown backend")
_LESS = (
  "; a smaller batch needs less (of a run: data.batch_size, or "
  "optim.accumulation for parts of it, and model.remat)"
)
_INSTALL = "; pip install 'moh_jax[train]'"
_HELP = {"-h", "--help"}
Run = Callable[[Any], int]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m moh_jax COMMAND ...` and returns its exit status."""
  # Names that the terminal cannot show must not end a command.
  with contextlib.suppress(AttributeError):  # stdout may be a notebook's
    sys.stdout.reconfigure(errors="backslashreplace")
  imports = Parser(add_help=False, allow_abbrev=False)
  imports.add_argument(
    "--import",
    dest="modules",
    action="append",
    default=[],
    metavar="MODULE",
    help="import a module first, such as one that registers a family, by its "
    "name in the current folder or installed",
  )
  parser = Parser(
    prog="python -m moh_jax",
    parents=[imports],
    description="Mixture-of-Head attention: train, convert and use models.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  version = f"moh_jax {__version__}"
  parser.add_argument("--version", action="version", version=version)
  parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
  parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
  given, argv = imports.parse_known_args(argv)
  if _HELP.intersection(argv[:1]):
    sentences = {name: _sentence(name) for name in COMMANDS}
    parser.epilog = _listed("commands", sentences)
  if not argv:
    parser.error(f"the command is missing: {', '.join(COMMANDS)}")
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
  _open_missing_streams()
  if sys.flags.optimize > 1:
    _print_error(
      "python -OO and PYTHONOPTIMIZE=2 remove the texts that options are read "
      "from; run without"
    )
    status = 2
  else:
    try:
      status = main(argv)
    except SystemExit as end:  # as after a help
      status = end.code
  if status:  # and an error that is told already
    with contextlib.suppress(OSError):
      _flush_stdout()
  else:
    status = report_errors(_flush_stdout, False)
  if status:
    with contextlib.suppress(OSError):
      sys.stderr.flush()
    os._exit(status)
  sys.exit(status)


def _open_missing_streams() -> None:
  """Gives a process without standard streams empty ones, as of `>&-`.

  Else the first file that a command opens would be taken for one.
  """
  for number, (name, mode) in enumerate(
    (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
  ):
    try:
      os.fstat(number)
    except OSError:
      null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
      setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))


def _flush_stdout() -> int:
  """Writes what is left; a disk may be full only now."""
  try:
    sys.stdout.flush()
  except BrokenPipeError:
    raise
  except OSError as error:
    _drop_stdout()
    raise OSError(error.errno, error.strerror, command.STDOUT) from error
  return 0


def _drop_stdout() -> None:
  """Lets what stdout still holds go nowhere, when Python closes it."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, argv: Sequence[str], modules: Sequence[str]) -> int:
  """Parses a command's arguments, checks its inputs and runs it."""
  try:
    os.getcwd()
  except FileNotFoundError as error:
    raise FileNotFoundError("the current folder was removed") from error
  for module in modules:
    try:
      importlib.import_module(module)
    except (KeyboardInterrupt, processes.StoppedError):
      raise
    except BaseException as error:  # whatever the module's own code raises
      name = pathlib.PurePath(module).stem if module.endswith(".py") else ""
      raise ValueError(
        f"--import {module!r}: {type(error).__name__}: {error}; it takes a "
        f"name as `import` does{name and f', {name!r} of this file'}, in the "
        "current folder or installed"
      ) from error
  given, run = parsed(name, argv)
  try:
    with _plain_warnings():
      given.prepare()
    # Several processes would wait for one another's lock on a shared disk.
    if given.KEEPS_PROGRAMS and not getattr(given, "distributed", False):
      compilation_cache.enable()
    with _plain_warnings():
      return run(given)
  except SystemExit as end:  # only code of others ends a process
    raise ValueError(
      "code that moh_jax called (--import, a config or a library) ended with "
      f"sys.exit({end.code!r})"
    ) from end


def parsed(name: str, argv: Sequence[str]) -> tuple[command.BaseOptions, Run]:
  """The options of a command, and the function that takes them.

  Wrong ones end the program with status 2, and --help with 0.

  Args:
    name: of the command.
    argv: what follows it.
  """
  prog, cls, run, argv = _kind(name, argv)
  parser = flags.make_parser(prog, cls)
  if _HELP.intersection(argv):
    parser.print_help()
    others, changes = flags.split_changes(argv)
    config = Parser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    if file := config.parse_known_args(others)[0].config:
      described = reference.describe(steps.load_config(file, changes))
      with files.named_errors(command.STDOUT):
        print(f"\n{described}")
    sys.exit(0)
  return flags.parse(parser, cls, argv), run


def kinds(name: str) -> dict[str, tuple[type[command.BaseOptions], Run]]:
  """Options and function of each kind of a command; "" where it has one."""
  module = importlib.import_module(f"moh_jax.cli.{name}")
  if hasattr(module, "KINDS"):
    return module.KINDS
  return {"": (module.Options, module.run)}


def _kind(
  name: str, argv: Sequence[str]
) -> tuple[str, type[command.BaseOptions], Run, Sequence[str]]:
  """What messages call a command, its options, function and arguments."""
  prog, every = f"python -m moh_jax {name}", kinds(name)
  if "" in every:
    return (prog, *every[""], argv)
  parser = Parser(
    prog=prog,
    description=_sentence(name),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog=_listed("kinds", {k: _first_line(v[0]) for k, v in every.items()}),
  )
  parser.add_argument("kind", choices=every, metavar="KIND")
  kind = parser.parse_args(argv[:1]).kind
  return (f"{prog} {kind}", *every[kind], argv[1:])


def _listed(title: str, sentences: Mapping[str, str]) -> str:
  """A list of names with what they do, for a help."""
  lines = (f"  {name:<17} {text}" for name, text in sentences.items())
  return "\n".join([f"{title}:", *lines])


def _sentence(name: str) -> str:
  """What a command does: the first line of its options or its module."""
  module = importlib.import_module(f"moh_jax.cli.{name}")
  return _first_line(getattr(module, "Options", module))


def _first_line(described: Any) -> str:
  return inspect.getdoc(described).partition("\n")[0]


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
  """Shows our warnings without prefix, whatever libraries add to the root.

  Handlers that our logger has, as in programs that call `main`, stay.
  """
  ours, pillow = logging.getLogger("moh_jax"), logging.getLogger("PIL")
  before = ours.handlers, ours.propagate
  pillow_level = pillow.level
  pillow.setLevel(logging.CRITICAL)  # what it logs, it raises too
  if not ours.handlers:
    terminal = logging.StreamHandler()
    terminal.setFormatter(command.OneLine())
    terminal.setLevel(logging.WARNING)
    ours.handlers, ours.propagate = [terminal], False
  try:
    yield
  finally:
    ours.handlers, ours.propagate = before
    pillow.setLevel(pillow_level)


def report_errors(call: Callable[[], int], show_traceback: bool) -> int:
  """Runs a command, turning the user's mistakes into lines on stderr."""
  try:
    with processes.handled():
      return call()
  except processes.StoppedError as stopped:
    _print_error(str(stopped))
    return stopped.status
  except BrokenPipeError:  # the reader of stdout has seen enough
    _drop_stdout()
    return 1
  except Exception as error:
    text = _explained(error)
    if text is None:
      raise
    if show_traceback:
      traceback_lib.print_exc()
    else:
      several = isinstance(error, MistakesError)
      for line in text.splitlines() if several else [text]:
        _print_error(" ".join(line.split()) or type(error).__name__)
    return 1 if isinstance(error, FloatingPointError) else 2


def _explained(error: Exception) -> str | None:
  """What the user can mend of an error; None for a defect of ours."""
  text = str(error)
  if _is_missing(error):
    return text + _INSTALL
  if _NO_SPACE in text and _FULL in text and (place := _PLACE.search(text)):
    return f"{place[1]}: {_NO_SPACE}"  # of the libraries' many lines
  if _FULL in text:
    return text + _LESS
  if _lacks_device(error):
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return f"JAX_PLATFORMS={platforms!r}: JAX finds no such device"
  if isinstance(error, KeyError) and "://" in text:  # such as foo://
    return f"there is no file system {text}"
  if type(error) is ImportError and error.name is None:  # gs:// without gcsfs
    return text
  if isinstance(error, _USER_ERRORS) or any(x in text for x in _NO_DEVICE):
    return text
  if not (foreign := " and ".join(registry.foreign())):
    return None
  return (
    f"{type(error).__name__}: {text}; {foreign} may be the cause, --traceback "
    "shows where it came from"
  )


def _print_error(text: str) -> None:
  with contextlib.suppress(OSError):  # the status remains to tell
    text = files.printable(text)
    print(f"error: {text}", file=sys.stderr)


def _lacks_device(error: Exception) -> bool:
  """Whether JAX asserts that there is a backend, as with JAX_PLATFORMS=cuda."""
  if not isinstance(error, AssertionError):
    return False
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError):
    return True
  return False


def _is_missing(error: Exception) -> bool:
  """Whether a library is not installed; jax, flax and few others always are."""
  name = getattr(error, "name", None) or "moh_jax"
  is_ours = name.partition(".")[0] == "moh_jax"
  return isinstance(error, ModuleNotFoundError) and not is_ours
