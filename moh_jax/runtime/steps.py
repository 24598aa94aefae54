"""The checkpoints of a directory, and which of them are whole.

Importable without JAX.
"""

import dataclasses
import errno
import itertools
import logging
import os
from collections.abc import Callable, Collection, Sequence

from etils import epath

from moh_jax.runtime import manifest
from moh_jax.runtime.location import no_checkpoint, steps_folder, workdir

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 3  # damaged files in a message
_COMMITTED = "commit_success.txt"  # Orbax's mark of a whole folder in a bucket
_SET_ASIDE = "damaged"


class DamagedCheckpointError(ValueError):
  """Files of a checkpoint are not as they were written."""


@dataclasses.dataclass(frozen=True)
class StepReport:
  """What the checksums of a checkpoint say.

  Attributes:
    step: step of the checkpoint.
    damage: damaged files; None if the checkpoint has no checksums.
  """

  step: int
  damage: Sequence[manifest.Damage] | None

  def __str__(self) -> str:
    if self.damage is None:
      return f"step {self.step}: without checksums, an older version wrote it"
    if not self.damage:
      return f"step {self.step}: whole"
    named = "; ".join(map(str, self.damage[:_MOST_NAMED]))
    more = len(self.damage) - _MOST_NAMED
    return f"step {self.step}: damaged, {named}" + (
      f"; and {more} more files" if more > 0 else ""
    )


def list_steps(directory: str | epath.Path) -> list[int]:
  """Steps of the checkpoints in a working directory, the oldest first."""
  folder = steps_folder(directory)
  if not folder.is_dir():
    return []
  marked = "://" in os.fspath(folder)
  return sorted(
    int(path.name)
    for path in folder.iterdir()
    if path.name.isascii() and path.name.isdecimal() and path.is_dir()
    if not marked or (path / _COMMITTED).exists()
  )


def find_step(directory: str | epath.Path, step: int | None) -> int:
  """Checks that a checkpoint exists; returns its step.

  Args:
    directory: working directory.
    step: step of the checkpoint; None is the newest.

  Raises:
    FileNotFoundError: there is no such checkpoint; the message lists others.
  """
  steps = list_steps(directory)
  if not steps:
    raise no_checkpoint(directory)
  if step is None:
    return max(steps)
  if step not in steps:
    raise FileNotFoundError(
      f"{directory} holds no checkpoint of step {step}; it has {steps}"
    )
  return step


def step_folder(directory: str | epath.Path, step: int) -> epath.Path:
  """The folder of one checkpoint."""
  return steps_folder(directory) / str(step)


def report(
  directory: str | epath.Path, step: int, items: Collection[str] | None = None
) -> StepReport:
  """Compares the files of a checkpoint with its checksums.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: items to read; None reads all.
  """
  folder = step_folder(directory, step)
  return StepReport(step, manifest.find_damage(folder, items))


def check_whole(
  directory: str | epath.Path, step: int, items: Collection[str] | None = None
) -> None:
  """Checks that a checkpoint is as it was written, before it is used.

  Args:
    directory: working directory.
    step: step of the checkpoint.
    items: items that will be read; None is all.

  Raises:
    DamagedCheckpointError: it is not; the message names the item and the file,
      and the newest checkpoint before it that is whole.
  """
  found = report(directory, step, items)
  if found.damage is None and items != {"config"}:
    _LOG.warning(
      "%s, checkpoint %d has no checksums, so that damage would not be "
      "noticed: an older version wrote it",
      directory,
      step,
    )
  if not found.damage:
    return
  before = [s for s in list_steps(directory) if s < step]
  whole = next(
    (s for s in reversed(before) if not report(directory, s, items).damage),
    None,
  )
  hint = "no checkpoint before it is whole"
  if whole is not None:
    hint = f"the newest whole one before it is step {whole}"
  raise DamagedCheckpointError(f"{directory}, checkpoint of {found}; {hint}")


def newest_whole_step(
  directory: str | epath.Path,
  items: Collection[str] | None = None,
  prefer: Callable[[Sequence[int]], int] = max,
) -> int:
  """Finds the newest checkpoint that is whole; warns of newer ones.

  A checkpoint without checksums counts as whole.

  Args:
    directory: working directory.
    items: items that will be read; None is all.
    prefer: chooses another one of the steps, until the chosen one is whole.

  Raises:
    FileNotFoundError: there is no checkpoint.
    DamagedCheckpointError: none is whole.
  """
  find_step(directory, None)
  left, damaged = list_steps(directory), []
  while left:
    step = prefer(left)
    found = report(directory, step, items)
    if not found.damage:
      for other in damaged:
        _LOG.warning("%s, checkpoint of %s", directory, other)
      if damaged:
        _LOG.warning("using the checkpoint of step %d instead", step)
      return step
    damaged.append(found)
    left.remove(step)
  raise DamagedCheckpointError(
    f"{directory} has no whole checkpoint; {'; '.join(map(str, damaged))}"
  )


def set_aside_after(directory: str | epath.Path, step: int) -> None:
  """Moves checkpoints after a step to DIR/damaged/: no run continues them.

  A run that continues at `step` will write checkpoints of their names again.
  Where DIR/checkpoints is on another disk than DIR, they stay on theirs, in
  DIR/checkpoints/damaged/, and DIR/damaged/ has links to them.
  """
  here = workdir(directory) / _SET_ASIDE
  there = steps_folder(directory) / _SET_ASIDE
  for later in list_steps(directory):
    if later > step:
      here.mkdir(parents=True, exist_ok=True)
      source = step_folder(directory, later)
      names = (f"{later}.{number}" for number in itertools.count(1))
      name = next(
        n for n in names if not any((to / n).exists() for to in (here, there))
      )
      target, kept = here / name, there / name
      try:
        source.rename(target)
      except OSError as error:
        if error.errno != errno.EXDEV:
          raise
        # The link comes first: after a kill between the two it leads nowhere,
        # and the next call makes it again.
        there.mkdir(exist_ok=True)
        target.unlink(missing_ok=True)
        os.symlink(os.path.realpath(kept), target)
        source.rename(kept)
      _LOG.warning("the checkpoint of step %d is set aside: %s", later, target)


def stored_bytes(directory: str | epath.Path) -> int | None:
  """Bytes of the newest checkpoint, None where no manifest says them."""
  steps = list_steps(directory)
  try:
    entries = (
      manifest.read(step_folder(directory, steps[-1])) if steps else None
    )
  except (ValueError, OSError):
    return None
  return sum(entry.length for entry in entries.values()) if entries else None
