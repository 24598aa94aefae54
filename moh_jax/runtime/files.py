"""Files that are whole or absent, and JSON of a schema.

Importable without JAX.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from moh_jax.config.base import differing


def checksum(path: Any) -> tuple[str, int]:
  """Sums up a whole file.

  Args:
    path: `pathlib` or `epath` path, also in a bucket.

  Returns:
    XXH3 of 128 bits, in hexadecimal, and the length in bytes.
  """
  state, length = xxhash.xxh3_128(), 0
  with path.open("rb") as stream:
    while chunk := stream.read(1 << 20):
      state.update(chunk)
      length += len(chunk)
  return state.hexdigest(), length


def check_writable(path: str | os.PathLike) -> None:
  """Checks that a file or folder can be written, before long work is lost.

  Args:
    path: local; its folder may not exist yet.

  Raises:
    OSError: it cannot be written.
  """
  place = pathlib.Path(path).absolute()
  try:
    if place.is_file():
      place.open("ab").close()
      place = place.parent
    elif place.exists() and not place.is_dir():
      return  # such as /dev/stdout, which is written in place
    while not place.exists():
      place = place.parent
    tempfile.TemporaryFile(dir=place).close()
  except OSError as error:
    raise OSError(f"{path}: {place} cannot be written: {error}") from error


def inside(folder: str | os.PathLike, name: str, what: str) -> pathlib.Path:
  """The path of a name that must stay inside a folder.

  Args:
    folder: which.
    name: relative to it, as a file or an option says it.
    what: names the file or option, for the message.

  Raises:
    ValueError: the name is empty, absolute, or goes up by "..".
  """
  path = pathlib.PurePath(name)
  if not name or path.is_absolute() or ".." in path.parts:
    raise ValueError(f"{what}={name!r} must be a name inside {folder}")
  return pathlib.Path(folder, name)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A path to write to; what is there at the end takes `path`'s place.

  After an error `path` is what it was.

  Args:
    path: file to write or replace; its directory is made.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    raise IsADirectoryError(f"{path}: is a folder, must be a file")
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
  try:
    yield temporary
    with temporary.open("r+b") as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def write_whole(path: Any, content: bytes) -> None:
  """Writes a file whole or not at all.

  Args:
    path: `pathlib` or `epath` path to write or replace, also in a bucket; its
      directory is made.
    content: of the file.
  """
  # Buckets write whole files anyway; /dev/null stays what it is.
  if "://" in os.fspath(path) or os.fspath(path).startswith("/dev/"):
    path.write_bytes(content)
    return
  with replacing(path) as temporary:
    temporary.write_bytes(content)


def read_json(path: str | os.PathLike, kind: Any = dict) -> Any:
  """Reads a local JSON file; see `parse_json`.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no JSON of that kind.
  """
  return parse_json(pathlib.Path(path).read_bytes(), kind, os.fspath(path))


def parse_json(
  content: bytes | str, kind: Any = dict, where: str = "JSON"
) -> Any:
  """Parses JSON and checks it.

  Args:
    content: UTF-8.
    kind: type that the values must fit, as `msgspec.convert` takes it.
    where: what the content is, for messages: most often the file.

  Returns:
    Dicts, lists, texts, numbers, booleans and None.

  Raises:
    ValueError: the content is no JSON, or does not fit; the message begins with
      `where` and names the field.
  """
  try:
    value = json.loads(content)
  except ValueError as error:
    raise ValueError(f"{where}: not valid JSON: {error}") from error
  return check_json(value, kind, where)


def check_json(value: Any, kind: Any, where: str = "") -> Any:
  """Checks parsed JSON as `parse_json` does, and returns it."""
  try:
    msgspec.convert(value, kind)
  except msgspec.ValidationError as error:
    raise ValueError(f"{where}: {error}" if where else str(error)) from error
  return value


def strict_json(value: Any, indent: int | None = None) -> str:
  """Text of a value that every reader takes: NaN and infinity become null."""
  finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
  return json.dumps(finite, indent=indent)


def differences(wanted: dict[str, Any], stored: dict[str, Any]) -> str:
  """The entries that differ, as "seed: 1 here, 0 there"; "" if none does.

  Args:
    wanted: settings of this call.
    stored: those of an earlier call, parsed from JSON.
  """
  return "; ".join(differing(json.loads(json.dumps(wanted)), stored))


def same_settings(
  path: pathlib.Path, settings: dict[str, Any], what: str
) -> bool:
  """Whether a file says with which settings something was begun.

  Args:
    path: the file.
    settings: of this call.
    what: was begun, for the message: "out.jsonl holds completions".

  Raises:
    ValueError: it says others; they are named.
  """
  if not path.exists():
    return False
  if found := differences(settings, read_json(path)):
    raise ValueError(
      f"{what} of other settings; {found}. Choose another --out or the "
      "same settings"
    )
  return True
