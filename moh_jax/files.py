"""Files that are whole or absent, never partial."""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def disk_errors(what: str, whole: str) -> Iterator[None]:
  """Turns errors of writing into an OSError that says how to continue.

  Args:
    what: what is being written, for example "a shard".
    whole: what is whole whatever happens, for example "the others are".
  """
  try:
    yield
  except (RuntimeError, OSError) as error:  # array_record raises RuntimeError
    raise OSError(
      f"{what} cannot be written: {error}; {whole} whole: make space and run "
      "the same command again"
    ) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Gives a path to write to; what is there at the end takes `path`'s place.

  After an error, or a kill, `path` is what it was.

  Args:
    path: file to write or replace; its directory must exist.
  """
  path = pathlib.Path(path)
  temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
  try:
    yield temporary
    with temporary.open("r+b") as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def write_whole(path: Any, content: bytes) -> None:
  """Writes a file that takes an old one's place when it is whole.

  Args:
    path: `pathlib` or `epath` path to write or replace, also in a bucket; its
      directory must exist.
    content: of the file.
  """
  if "://" in os.fspath(path):  # buckets always write complete files
    path.write_bytes(content)
    return
  with replacing(path) as temporary:
    temporary.write_bytes(content)
