"""Runs of `train` as processes of their own, to disturb and to compare."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl.testing import parameterized

from moh_jax.runtime import steps
from tests import two_processes
from tests.training import tiny

_ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "tests/faults/tiny_run.py"


class Run:
  """A process, or some, of `train`; the stderr of each is a file."""

  def __init__(
    self,
    workdir: str,
    logs: str,
    *options: str,
    family: str = "llm",
    processes: int = 1,
    shell: str = "",
  ):
    """Starts it.

    Args:
      workdir: working directory, which need not exist.
      logs: folder of the files of stderr.
      *options: further options.
      family: of the model.
      processes: number of processes, of one device each.
      shell: a command of a shell to run first, such as "ulimit -f 100".
    """
    argv = [sys.executable, "-m", "moh_jax", "train", "--workdir", workdir]
    argv += ["--config", f"{CONFIG}:{family}", *options]
    flags = os.environ["XLA_FLAGS"]
    one = f"{flags} --xla_force_host_platform_device_count=1"
    environment = {**os.environ, "XLA_FLAGS": one}
    if processes > 1:
      argv.append("--distributed")
      environment["JAX_COORDINATOR_ADDRESS"] = two_processes.free_address()
      environment["JAX_NUM_PROCESSES"] = str(processes)
    if shell:
      argv = ["bash", "-c", f'{shell}; exec "$@"', "bash", *argv]
    self.workdir, self.processes = workdir, []
    self.files = [pathlib.Path(logs, f"{i}") for i in range(processes)]
    for index, file in enumerate(self.files):
      environment["JAX_PROCESS_ID"] = str(index)
      with file.open("w") as stderr:
        streams = {"stdout": subprocess.DEVNULL, "stderr": stderr}
        process = subprocess.Popen(argv, env=environment, cwd=_ROOT, **streams)
      self.processes.append(process)

  def wait(self, timeout: float = 300) -> int:
    """Waits for all processes; the exit status of the first."""
    statuses = [process.wait(timeout) for process in self.processes]
    return statuses[0]

  def stop(self) -> None:
    """Kills what still runs."""
    for process in self.processes:
      process.kill()
      process.wait()

  def said(self, index: int = 0) -> str:
    """What a process wrote to stderr so far."""
    return self.files[index].read_text()

  def error(self, index: int = 0) -> str:
    """The one line that begins with "error:"."""
    said = self.said(index)
    assert "Traceback" not in said, said
    (line,) = re.findall("^error:.*$", said, re.M)
    return line

  def wait_for(self, condition: Any, timeout: float = 240) -> bool:
    """Waits until a condition holds; False if all processes ended before."""
    deadline = time.monotonic() + timeout
    while not condition():
      if all(process.poll() is not None for process in self.processes):
        return False
      assert time.monotonic() < deadline, self.said()
      time.sleep(0.02)
    return True

  def wait_for_text(self, text: str) -> bool:
    """Waits until the first process says something."""
    return self.wait_for(lambda: text in self.said())

  def wait_for_step(self, step: int) -> bool:
    """Waits until a row of a step is written."""
    return self.wait_for(lambda: any(s >= step for s, _ in rows(self.workdir)))


class RunsTest(parameterized.TestCase):
  """Starts runs, and ends what is left of them."""

  def start(self, *options: str, workdir: str = "", **more: Any) -> Run:
    """A run in a directory of its own, unless one is named; see `Run`."""
    logs = self.create_tempdir().full_path
    run = Run(workdir or os.path.join(logs, "run"), logs, *options, **more)
    self.addCleanup(run.stop)
    return run

  def finished(self, *options: str, **more: Any) -> str:
    """The working directory of a run that nobody disturbs."""
    run = self.start(*options, **more)
    self.assertEqual(run.wait(900), 0, run.said())
    return run.workdir

  def check_newest(self, workdir: str) -> None:
    """The newest checkpoint is whole; an older one may be half deleted."""
    for step in steps.list_steps(workdir)[-1:]:
      self.assertEqual(steps.find_damage(workdir, step), {})


def rows(workdir: str | pathlib.Path) -> dict[tuple[int, str], dict[str, Any]]:
  """Rows of metrics.jsonl by step and split, without speeds.

  Raises:
    AssertionError: a row is there twice.
  """
  found: dict[tuple[int, str], dict[str, Any]] = {}
  file = pathlib.Path(workdir) / "metrics.jsonl"
  lines = file.read_text().splitlines() if file.exists() else []
  for line in lines:
    try:
      row = json.loads(line)
    except ValueError:
      continue  # being written
    key = row["step"], row["split"]
    assert key not in found, key
    found[key] = {k: v for k, v in row.items() if not tiny.is_time(k)}
  return found


def state(workdir: str | pathlib.Path) -> dict[str, np.ndarray]:
  """All arrays of the newest checkpoint."""
  step = steps.find_step(str(workdir), None)
  folder = steps.step_folder(str(workdir), step)
  found = {}
  # As numpy arrays, whatever devices the run had.
  how = ocp.RestoreArgs(restore_type=np.ndarray)
  with ocp.PyTreeCheckpointer() as reader:
    for item in ("params", "train", "ema"):
      if (folder / item).exists():
        described = reader.metadata(folder / item).item_metadata.tree
        args = jax.tree.map(lambda _: how, described)
        tree = reader.restore(folder / item, restore_args=args)
        for path, leaf in jax.tree.leaves_with_path(tree):
          found[f"{item}{jax.tree_util.keystr(path)}"] = leaf
  return found


def differences(workdir: Any, whole: Any, rtol: float = 0.0) -> list[str]:
  """How a disturbed run that finished differs from one that was not.

  Args:
    workdir: of the disturbed run.
    whole: of the other.
    rtol: of metrics and arrays; 0 asks for the same bits.

  Returns:
    Names of arrays and rows that differ.
  """
  ours, theirs = (
    state(folder)
    | {
      f"{key} {name}": value
      for key, row in rows(folder).items()
      for name, value in row.items()
    }
    for folder in (workdir, whole)
  )

  def same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or one is None or other is None:
      return one == other
    return np.allclose(one, other, rtol=rtol, atol=rtol)

  return [
    name
    for name in sorted(ours | theirs)
    if not same(ours.get(name), theirs.get(name))
  ]
