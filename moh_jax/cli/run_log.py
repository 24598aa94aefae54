"""Where a run's messages go: ours to the terminal, all of them to a file."""

import contextlib
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from moh_jax.cli.command import OneLine
from moh_jax.runtime.files import check_regular
from moh_jax.runtime.steps import absolute

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
LOG = "run.log"  # in the working directory
_OURS = "moh_jax"
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class _File(logging.FileHandler):
  """A log file; that it cannot be written is no reason to stop or to print."""

  def emit(self, record: logging.LogRecord) -> None:
    # Until the run has made its directory there is no file to write.
    with contextlib.suppress(OSError):
      super().emit(record)

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
    del record


@contextlib.contextmanager
def kept(options: Any) -> Iterator[None]:
  """Shows our own messages, and keeps those of libraries in WORKDIR/run.log.

  Tracebacks, also those of other threads and of an error that ends the block,
  are in the file alone.

  Args:
    options: of a command that trains: its `workdir`; in a bucket no file is
      written. Where it is `distributed`, what C++ code writes to stderr goes to
      the file too, such as the stacks of JAX's own watch over the processes.
  """
  file = _open(options.workdir)
  with contextlib.ExitStack() as stack:
    if options.distributed and isinstance(file, _File):
      stack.enter_context(_stderr_to(file))
    level = logging.INFO if options.is_first() else logging.WARNING
    stack.enter_context(_handlers(file, level))
    yield


@contextlib.contextmanager
def _stderr_to(file: "_File") -> Iterator[None]:
  """Leaves Python's stderr as it is, and sends that of C++ to a file."""
  try:
    os.makedirs(os.path.dirname(file.baseFilename), exist_ok=True)
    sys.stderr.flush()
    terminal, log = os.dup(2), os.open(file.baseFilename, _APPEND, 0o644)
  except OSError:
    yield
    return
  os_stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")
  before = sys.stderr
  os.dup2(log, 2)
  os.close(log)
  sys.stderr = os_stderr
  # After an error it stays so: C++ code may end the process at any moment.
  yield
  os_stderr.flush()
  os.dup2(terminal, 2)
  sys.stderr = before
  os_stderr.close()


@contextlib.contextmanager
def _handlers(file: logging.Handler, level: int) -> Iterator[None]:
  ours, root = logging.getLogger(_OURS), logging.getLogger()
  terminal = logging.StreamHandler()
  terminal.setLevel(level)
  terminal.setFormatter(OneLine())  # tracebacks are in the file
  # Some library may have sent all messages to stderr.
  kept = [h for h in root.handlers if not isinstance(h, logging.StreamHandler)]
  with contextlib.ExitStack() as before:
    before.callback(ours.setLevel, ours.level)
    ours.setLevel(logging.DEBUG)
    for owner, name, value in (
      (ours, "handlers", [terminal, file]),
      (ours, "propagate", False),
      (root, "handlers", [*kept, file]),
      (threading, "excepthook", _log_hook),
      (sys, "unraisablehook", _log_hook),
      (sys, "excepthook", lambda *error: _log_error(error)),  # of C++ code too
    ):
      before.callback(setattr, owner, name, getattr(owner, name))
      setattr(owner, name, value)
    try:
      yield
    except Exception:
      ours.debug("the run ended with an error", exc_info=True)
      raise
    finally:
      with contextlib.suppress(OSError):
        file.close()


def _open(workdir: str) -> logging.Handler:
  folder = absolute(workdir)
  if "://" in os.fspath(folder):
    return logging.NullHandler()
  path = pathlib.Path(folder) / LOG
  if path.exists():
    check_regular(path)  # a pipe would block
  file = _File(path, delay=True)
  file.setFormatter(logging.Formatter(_FORMAT))
  file.setLevel(logging.DEBUG)
  return file


def _log_hook(args: Any) -> None:
  _log_error((args.exc_type, args.exc_value, args.exc_traceback))


def _log_error(error: Any) -> None:
  logging.getLogger(_OURS).debug("error in a library", exc_info=error)
