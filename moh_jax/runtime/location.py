"""Where a run's directory keeps its checkpoints; importable without JAX."""

import os

from etils import epath

FOLDER = "checkpoints"


def resolve(directory: str | epath.Path) -> epath.Path:
  """An absolute local path, or a bucket's address as it is."""
  path = epath.Path(directory)
  is_bucket = "://" in os.fspath(path)
  return path if is_bucket else path.expanduser().absolute()


def steps_folder(directory: str | epath.Path) -> epath.Path:
  """DIR/checkpoints, also where DIR is already that folder."""
  return workdir(directory) / FOLDER


def workdir(directory: str | epath.Path) -> epath.Path:
  """DIR, which holds the tokenizer, also where DIR is DIR/checkpoints."""
  path = resolve(directory)
  return path.parent if path.name == FOLDER else path


def check_exists(directory: str | epath.Path) -> None:
  """Refuses a directory without a folder of checkpoints.

  Raises:
    FileNotFoundError: there is none.
  """
  if not steps_folder(directory).is_dir():
    raise no_checkpoint(directory)


def no_checkpoint(directory: str | epath.Path) -> FileNotFoundError:
  """The error of a directory that holds no checkpoint."""
  return FileNotFoundError(
    f"{directory} holds no checkpoint; expected "
    f"{steps_folder(directory)}/STEP, as train.py and `convert` write it"
  )
