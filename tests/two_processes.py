"""Python as a process of its own; two processes of one run on this machine."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).parents[1]


def python(*argv: object, **environment: str) -> tuple[int, str, str]:
  """Exit status, stdout and stderr of `python *argv` in the project's root."""
  argv, variables = map(str, argv), os.environ | environment
  found = subprocess.run(
    [sys.executable, *argv], cwd=_ROOT, env=variables, capture_output=True,
    text=True,
  )  # fmt: skip
  return found.returncode, found.stdout, found.stderr


def free_address() -> str:
  """An address of this machine where nobody listens."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


def call(*argv: str, timeout: float = 300) -> list[str]:
  """Runs `python *argv` twice, as the processes of one run.

  Args:
    *argv: of the interpreter.
    timeout: seconds until both have ended.

  Returns:
    What each of them printed.

  Raises:
    AssertionError: one of them failed.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  environment = {
    **os.environ,
    "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=2",
    "JAX_COORDINATOR_ADDRESS": free_address(),
    "JAX_NUM_PROCESSES": "2",
  }
  # Files: a pipe that nobody reads yet would stop a child that fills it.
  with tempfile.TemporaryDirectory() as folder:
    files = [pathlib.Path(folder, name) for name in ("first", "second")]
    children = []
    for index, file in enumerate(files):
      with file.open("w") as stdout:
        child = subprocess.Popen(
          [sys.executable, *argv],
          env={**environment, "JAX_PROCESS_ID": str(index)},
          stdout=stdout,
        )
      children.append(child)
    codes = [child.wait(timeout=timeout) for child in children]
    assert codes == [0, 0], codes
    return [file.read_text() for file in files]
