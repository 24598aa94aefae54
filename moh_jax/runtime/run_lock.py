"""The lock that gives a working directory to one run; importable without JAX.

The file DIR/run.lock names the host and the process of the run. On one machine
the kernel holds the lock (`flock`), so that it ends with the process whatever
ends it. Between machines that share the directory the file's time counts, which
a thread renews: a lock that is not renewed for `STALE_SECONDS` is taken over,
and a run that was taken over finds out and stops. Buckets are not locked.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import stat
import threading
import time
import uuid
from typing import Any

from moh_jax.runtime.files import boot
from moh_jax.runtime.json_files import parse_json
from moh_jax.runtime.steps import in_bucket, workdir

NAME = "run.lock"
RENEW_SECONDS = 1.0
STALE_SECONDS = 30.0
# How long an old lock is watched before it is taken over: clocks may differ.
_WATCH_SECONDS = 3 * RENEW_SECONDS
_MOST_BYTES = 4096


class RunningError(OSError):
  """Another run has the working directory."""


class RunLock:
  """The lock of a working directory, held from `take` to `release`.

  Where it was not taken, as in a bucket or by the other processes of a run, it
  does nothing.
  """

  def __init__(self, directory: str | os.PathLike):
    """Takes nothing yet.

    Args:
      directory: working directory.
    """
    self._directory, self._file = directory, None
    self._stop, self._lost = threading.Event(), False

  def take(self) -> None:
    """Takes the lock of the directory, which exists, within a few seconds.

    Raises:
      RunningError: another run has it.
      OSError: the lock's file cannot be written.
    """
    if in_bucket(self._directory):
      return
    self._path = _path(self._directory)
    self._file = _open(self._path)
    try:
      _check_free(self._file, self._path)
      self._token = uuid.uuid4().hex
      owner = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": boot(),
        "token": self._token,
      }
      os.ftruncate(self._file, 0)
      os.pwrite(self._file, json.dumps(owner).encode(), 0)
    except BaseException:
      os.close(self._file)
      self._file = None
      raise
    threading.Thread(target=self._renew, daemon=True).start()

  def release(self) -> None:
    """Lets the next run have the directory."""
    self._stop.set()
    if self._file is not None:
      with contextlib.suppress(OSError):
        if not self._lost:
          os.ftruncate(self._file, 0)
      os.close(self._file)
      self._file = None

  def check(self) -> None:
    """Checks that the directory still belongs to this run.

    Raises:
      RunningError: another run has taken it over.
    """
    if self._lost:
      raise RunningError(
        f"{self._path}: another run has taken over the working directory while "
        "this one stood still; nothing more is written"
      )

  def _renew(self) -> None:
    while not self._stop.wait(RENEW_SECONDS):
      # Opened anew, so that a network file system asks its server.
      owner = _read(self._path)
      if owner is not None and owner.get("token") != self._token:
        self._lost = True
        return
      with contextlib.suppress(OSError):
        os.utime(self._path)


def check_free(directory: str | os.PathLike) -> None:
  """Checks that no run has a working directory, without taking it.

  Raises:
    RunningError: a run has it.
  """
  if in_bucket(directory) or not _path(directory).exists():
    return
  try:
    file = _open(_path(directory))
  except PermissionError:
    return  # taking the lock says what is wrong
  try:
    _check_free(file, _path(directory))
  finally:
    os.close(file)


def _path(directory: str | os.PathLike) -> pathlib.Path:
  return pathlib.Path(os.fspath(workdir(directory))) / NAME


def _open(path: pathlib.Path) -> int:
  flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
  try:
    file = os.open(path, flags, 0o644)
  except OSError as error:
    raise type(error)(
      error.errno, f"{error.strerror}: the lock of the run", str(path)
    ) from error
  if not stat.S_ISREG(os.fstat(file).st_mode):
    os.close(file)
    raise OSError(f"{path} must be a regular file: it is the lock of the run")
  return file


def _check_free(file: int, path: pathlib.Path) -> None:
  """Checks, and where the kernel can also takes, an open lock."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    locks = True
  except OSError as error:
    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
      raise RunningError(_taken(path)) from None
    locks = False  # a file system that has no locks
  owner = _read(path)
  if not owner or (locks and owner.get("boot") == boot()):
    return  # released, or its process has ended
  age = _age(path)
  if age < -STALE_SECONDS:
    raise RunningError(
      f"{_taken(path)}. Its clock is {-age:.0f} seconds ahead, so that nobody "
      f"can tell whether it goes on: if it does not, remove {path}"
    )
  if age > STALE_SECONDS:
    before = os.stat(path).st_mtime_ns
    deadline = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < deadline:
      time.sleep(RENEW_SECONDS / 4)
      if os.stat(path).st_mtime_ns != before:
        raise RunningError(_taken(path))
    return
  raise RunningError(_taken(path))


def _taken(path: pathlib.Path) -> str:
  owner = _read(path) or {}
  return (
    f"workdir {path.parent} belongs to a run that is going on: process "
    f"{owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}; "
    "stop it first, or choose another workdir"
  )


def _age(path: pathlib.Path) -> float:
  """Seconds since a lock was renewed, by the clock of its file system."""
  probe = path.with_name(f".{NAME}.{uuid.uuid4().hex[:12]}.tmp")
  probe.touch()
  try:
    return os.stat(probe).st_mtime - os.stat(path).st_mtime
  finally:
    probe.unlink()


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """The owner that a lock names; {} for a released one, None if unreadable."""
  try:
    with open(path, "rb") as stream:
      content = stream.read(_MOST_BYTES)
    return parse_json(content) if content else {}
  except (OSError, ValueError):
    return None
