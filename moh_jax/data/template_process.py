"""Runs chat templates in a process of their own, whose time and memory end.

A template is a program of a checkpoint's author. The sandbox of transformers
lets it read and change nothing, but `'a' * 10**10` or loops within loops there
take all memory or for ever, and nothing within a process could end them.
"""

import atexit
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

SECONDS = 5  # of computing, for one conversation
_MEMORY = 1 << 29  # bytes beside what the libraries take
_MOST_MESSAGE = 500  # characters of an error
_CODE = "from moh_jax.data import template_process; template_process.main()"


class _Process:
  """The process, which is started when it is needed; safe among threads."""

  def __init__(self):
    self._lock, self._process, self._owner = threading.Lock(), None, 0

  def ask(self, request: bytes) -> bytes:
    """Sends a line to `main`; returns its answer."""
    with self._lock, self._started() as process:
      with contextlib.suppress(BrokenPipeError):  # then there is no answer
        process.stdin.write(request + b"\n")
        process.stdin.flush()
      if answer := process.stdout.readline():
        return answer
      what = f"its process ended with {process.wait()}"
      if process.returncode == -signal.SIGPROF:
        what = f"it takes more than {SECONDS} seconds"
      raise ValueError(f"fails: {what}")

  @contextlib.contextmanager
  def _started(self) -> Iterator[subprocess.Popen]:
    if self._owner != os.getpid():  # after a fork the process is the parent's
      self._process, self._owner = None, os.getpid()
    if self._process is None:
      path = os.pathsep.join(map(os.path.abspath, sys.path))
      self._process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the program that asks
      )
    try:
      yield self._process
    except BaseException:  # its next answer would be that of this request
      self.end()
      raise

  def end(self) -> None:
    """Ends the process, if there is one and it is ours."""
    process, self._process = self._process, None
    if process is not None and self._owner == os.getpid():
      process.kill()
      with contextlib.suppress(BrokenPipeError), process:
        pass  # closes its pipes


_PROCESS = _Process()
atexit.register(_PROCESS.end)


def call(method: str, state: dict[str, Any], *args: Any, **options: Any) -> Any:
  """Calls a method of `chat.Writer` in the process.

  Args:
    method: its name.
    state: fields of the object.
    *args: JSON values, as are the options and the result.
    **options: of the call.

  Raises:
    ValueError: the method fails, or takes too much time or memory.
  """
  request = [method, state, args, options]
  answer = json.loads(_PROCESS.ask(json.dumps(request).encode()))
  if "error" in answer:
    raise ValueError(answer["error"])
  return answer["value"]


def main() -> None:
  """Answers requests, one a line, until there are no more."""
  os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
  from moh_jax.data import chat

  with contextlib.suppress(ValueError):  # each call says what is missing
    chat.libraries()
  with contextlib.suppress(OSError, ValueError):  # as on macOS
    with open("/proc/self/statm") as file:
      used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY,) * 2)
  for line in sys.stdin.buffer:
    # Without a handler the signal ends the process whatever it computes.
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
      method, state, args, options = json.loads(line)
      value = getattr(chat.Writer(**state), method)(*args, **options)
      answer = json.dumps({"value": value})
    except (ValueError, MemoryError) as error:
      text = str(error)[:_MOST_MESSAGE] or "fails: MemoryError"
      answer = json.dumps({"error": " ".join(text.split())})
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
