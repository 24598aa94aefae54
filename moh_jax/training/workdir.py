"""The working directory of a run: written to, owned, and resumed from."""

import uuid
from collections.abc import Callable, Sequence

from etils import epath

from moh_jax.runtime import steps
from moh_jax.runtime.peers import ask_first_process
from moh_jax.runtime.run_lock import RunLock


def prepare(workdir: str) -> epath.Path:
  """Creates the directory and proves that it can be written.

  Raises:
    OSError: it cannot; the message names the directory and the reason.
  """
  directory = steps.absolute(workdir)
  probe = directory / f".write_probe.{uuid.uuid4().hex}"
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    probe.unlink()
  except OSError as error:
    raise OSError(f"workdir {directory} cannot be written: {error}") from error
  return directory


def find_resumable(
  directory: epath.Path,
  verify: bool,
  prefer: Callable[[Sequence[int]], int] = max,
) -> int | None:
  """The step to resume from, None for a new run; all processes agree.

  Args:
    directory: working directory.
    verify: take no damaged step.
    prefer: chooses one of the steps; see `steps.newest_whole_step`.

  Raises:
    ValueError: no checkpoint is whole.
  """

  def find() -> list[int]:
    known = steps.list_steps(directory)
    if not known:  # a new run, or one that was killed before its first save
      return [-1]
    if verify:
      return [steps.newest_whole_step(directory, prefer=prefer)]
    return [prefer(known)]

  (step,) = ask_first_process(find, 1)
  return None if step < 0 else step


def take_lock(directory: epath.Path) -> RunLock:
  """The lock of the working directory, which the first process takes."""
  lock = RunLock(directory)
  ask_first_process(lock.take)
  return lock
