"""Two processes of one run on this machine, of two fake devices each."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile


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
