"""Runs chat templates in a process of their own, whose time and memory end.

A template is a program of a checkpoint's author. The sandbox of transformers
lets it read and change nothing, but `'a' * 10**10` or loops within loops there
take all memory or for ever, and nothing within a process could end them.
"""

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 5  # of computing, for one conversation
_MEMORY = 1 << 29  # bytes beside what the libraries take
_MOST_MESSAGE = 500  # characters of an error
_CODE = "from moh_jax.data import template_process; template_process.main()"


_LOCK = threading.Lock()


@functools.cache
def _process(owner: int) -> subprocess.Popen:
  """The process of this one, whose id is `owner`: forks have their own."""
  del owner
  path = os.pathsep.join(map(os.path.abspath, sys.path))
  process = subprocess.Popen(
    [sys.executable, "-P", "-c", _CODE],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**os.environ, "PYTHONPATH": path},
    start_new_session=True,  # Ctrl-C is for the program that asks
  )
  atexit.register(_end, process)
  return process


def _end(process: subprocess.Popen) -> None:
  process.kill()
  with contextlib.suppress(BrokenPipeError), process:
    pass  # closes its pipes


def _ask(request: bytes) -> bytes:
  """Sends a line to `main`; returns its answer."""
  with _LOCK:
    process = _process(os.getpid())
    try:
      with contextlib.suppress(BrokenPipeError):  # then there is no answer
        process.stdin.write(request + b"\n")
        process.stdin.flush()
      if answer := process.stdout.readline():
        return answer
      what = f"its process ended with {process.wait()}"
      if process.returncode == -signal.SIGPROF:
        what = f"it takes more than {SECONDS} seconds"
      raise ValueError(f"fails: {what}")
    except BaseException:  # its next answer would be that of this request
      _end(process)
      _process.cache_clear()
      raise


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
  answer = json.loads(_ask(json.dumps(request).encode()))
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
