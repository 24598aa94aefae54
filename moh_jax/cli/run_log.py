"""Where a run's messages go: ours to the terminal, all of them to a file."""

import contextlib
import logging
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

from moh_jax.cli.command import OneLine
from moh_jax.runtime.steps import absolute

_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def kept(options: Any) -> Iterator[None]:
  """Shows our own messages, and keeps those of libraries in WORKDIR/run.log.

  Tracebacks, also those of other threads and of an error that ends the block,
  are in the file alone.

  Args:
    options: of a command that trains: its `workdir`; in a bucket no file is
      written.
  """
  ours, root = logging.getLogger("moh_jax"), logging.getLogger()
  terminal = logging.StreamHandler()
  terminal.setLevel(logging.INFO if options.is_first() else logging.WARNING)
  terminal.setFormatter(OneLine())
  file, folder = logging.NullHandler(), absolute(options.workdir)
  if "://" not in os.fspath(folder):
    with contextlib.suppress(OSError):  # which the run tells by itself
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
      file = logging.FileHandler(pathlib.Path(folder) / "run.log")
      file.setFormatter(logging.Formatter(_FORMAT))
  # Some library may have sent all messages to stderr.
  others = [
    x for x in root.handlers if not isinstance(x, logging.StreamHandler)
  ]
  changes = (
    (ours, "handlers", [terminal, file]),
    (ours, "propagate", False),
    (root, "handlers", [*others, file]),
    (threading, "excepthook", _keep),
  )
  with contextlib.ExitStack() as before:
    before.callback(ours.setLevel, ours.level)
    ours.setLevel(logging.DEBUG)
    for owner, name, value in changes:
      before.callback(setattr, owner, name, getattr(owner, name))
      setattr(owner, name, value)
    try:
      yield
    except Exception:
      ours.debug("the run ended with an error", exc_info=True)
      raise
    finally:
      file.close()


def _keep(args: Any) -> None:
  error = args.exc_type, args.exc_value, args.exc_traceback
  logging.getLogger("moh_jax").debug("error in a thread", exc_info=error)
