"""Says in one line that a process of a run has ended without saying why.

When the first process of a run dies, JAX's C++ code ends the others within a
second, and no Python code of theirs runs any more. A witness is a small process
of its own that waits for the end of the process which started it.
"""

import contextlib
import os
import pathlib
import subprocess
import sys

_DISMISSED = "dismissed\n"


class Witness:
  """A witness of this process, until `dismiss` or the end of the process."""

  def __init__(self, steps_folder: str, log: str):
    """Starts it; its line goes to this process's stderr.

    Args:
      steps_folder: local folder of the run's checkpoints.
      log: file that says more.
    """
    self._child = subprocess.Popen(
      [sys.executable, "-I", __file__, steps_folder, log],
      stdin=subprocess.PIPE,
      stderr=sys.stderr,
      text=True,
      start_new_session=True,  # signals of the terminal are not for it
    )

  def dismiss(self) -> None:
    """Ends it in silence: this process ends in order, or says why itself."""
    with contextlib.suppress(OSError, ValueError):
      self._child.communicate(_DISMISSED)


def _main(steps_folder: str, log: str) -> None:
  if sys.stdin.readline() == _DISMISSED:
    return
  steps = [-1]
  with contextlib.suppress(OSError):
    names = os.listdir(steps_folder)
    steps += [int(name) for name in names if name.isdecimal()]
  workdir = pathlib.Path(steps_folder).parent
  last = f"the last whole checkpoint in {workdir} is step {max(steps)}"
  if max(steps) < 0:
    last = f"{workdir} holds no checkpoint"
  print(
    "error: this process of the run was ended, as happens when the first one "
    f"is gone; {log} says more; {last}; start all processes again to resume",
    file=sys.stderr,
  )


if __name__ == "__main__":
  _main(*sys.argv[1:])
