"""Where messages go: ours to the terminal, those of a run to a file too."""

import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from moh_jax.runtime.steps import absolute

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_OURS = logging.getLogger("moh_jax")


@contextlib.contextmanager
def shown() -> Iterator[None]:
  """Shows our warnings without prefix, whatever libraries add to the root.

  Handlers that our logger has, as in programs that call `main`, stay.
  """
  logging.getLogger("PIL").setLevel(logging.CRITICAL)  # it raises what it logs
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
  """Shows our own messages, and keeps all in WORKDIR/run.log, with tracebacks.

  Args:
    options: of a command that trains: its `workdir`; in a bucket no file is
      written.
  """
  file, folder = logging.NullHandler(), absolute(options.workdir)
  if "://" not in os.fspath(folder):
    with contextlib.suppress(OSError):  # which the run tells by itself
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
      file = logging.FileHandler(pathlib.Path(folder) / "run.log")
      file.setFormatter(logging.Formatter(_FORMAT))
  for terminal in _OURS.handlers * options.is_first():
    terminal.setLevel(logging.INFO)
  level, loggers = _OURS.level, (_OURS, logging.getLogger())
  _OURS.setLevel(logging.DEBUG)
  for logger in loggers:
    logger.addHandler(file)
  try:
    yield
  except Exception:
    _OURS.debug("the run ended with an error", exc_info=True)
    raise
  finally:
    for logger in loggers:
      logger.removeHandler(file)
    _OURS.setLevel(level)
    file.close()
