"""Where messages go: ours to the terminal, those of a run to a file too."""

import contextlib
import logging
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

from moh_jax.runtime.steps import absolute

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_OURS = logging.getLogger("moh_jax")
_BEFORE_RUNS = {"run.log", "run.lock"}  # of a workdir, before a run begins


@contextlib.contextmanager
def shown() -> Iterator[None]:
  """Shows our warnings without prefix, whatever libraries add to the root.

  Handlers that our logger has, as in programs that call `main`, stay.
  """
  for library in ("PIL", "absl"):  # they, as Orbax, raise what they log
    logging.getLogger(library).setLevel(logging.CRITICAL)
  terminal = logging.StreamHandler()
  terminal.setLevel(logging.WARNING)
  _OURS.addHandler(terminal)
  _OURS.propagate = False
  try:
    yield
  finally:
    _OURS.removeHandler(terminal)
    _OURS.propagate = True


@contextlib.contextmanager
def kept(options: Any) -> Iterator[None]:
  """Shows our own messages, and keeps all in WORKDIR/run.log.

  Tracebacks, of other threads and of C++ code too, are in the file alone. A run
  that is refused before it writes anything leaves no folder.

  Args:
    options: of a command that trains: its `workdir`; in a bucket no file is
      written.
  """
  file, folder = logging.NullHandler(), absolute(options.workdir)
  is_new = not folder.exists()
  if "://" not in os.fspath(folder):
    with contextlib.suppress(OSError):  # which the run tells by itself
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
      file = _File(pathlib.Path(folder) / "run.log")
      file.setFormatter(logging.Formatter(_FORMAT))
  for terminal in _OURS.handlers * options.is_first():
    terminal.setLevel(logging.INFO)
  root, level = logging.getLogger(), _OURS.level
  with contextlib.ExitStack() as before:
    before.callback(file.close)
    before.callback(_OURS.setLevel, level)
    for owner, name, value in (
      (_OURS, "handlers", [*_OURS.handlers, file]),
      (root, "handlers", [*root.handlers, file]),
      (threading, "excepthook", _log_error),
      (sys, "unraisablehook", _log_error),
      (sys, "excepthook", lambda *error: _log_error(error)),  # of C++ code
    ):
      before.callback(setattr, owner, name, getattr(owner, name))
      setattr(owner, name, value)
    _OURS.setLevel(logging.DEBUG)
    try:
      yield
    except Exception:
      _OURS.debug("the run ended with an error", exc_info=True)
      if is_new and {path.name for path in folder.glob("*")} <= _BEFORE_RUNS:
        file.close()
        shutil.rmtree(folder, ignore_errors=True)
      raise


class _File(logging.FileHandler):
  """A log file; of a full disk its run tells, not the file's own errors."""

  def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
    del record

  def close(self) -> None:
    with contextlib.suppress(OSError):
      super().close()


def _log_error(error: Any) -> None:
  """Logs what a hook gets: type, value and traceback, first of all."""
  _OURS.debug("error in a library", exc_info=tuple(error)[:3])
