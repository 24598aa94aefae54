"""Runs of `train` as processes of their own, to disturb and to compare."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from moh_jax.runtime import steps
from tests.training import tiny

_ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "tests/faults/tiny_run.py"


class Run:
  """A process, or some, of `train`; its stderr is a file."""

  def __init__(
    self,
    workdir: str,
    *options: str,
    family: str = "llm",
    processes: int = 1,
    niceness: int = 0,
    shell: str = "",
    name: str = "",
    last: Sequence[str] = (),
  ):
    """Starts it.

    Args:
      workdir: working directory, which need not exist.
      *options: further options.
      family: of the model.
      processes: number of processes, of one device each.
      niceness: added to that of this process.
      shell: commands of a shell to run first, such as "ulimit -f 100".
      name: of its files of stderr, where several runs have one directory.
      last: options of the last process alone.
    """
    argv = [
      *(sys.executable, "-m", "moh_jax", "train", "--workdir", workdir),
      *("--config", f"{CONFIG}:{family}", *options),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = re.sub(
      r"--xla_force_host_platform_device_count=\d+", "", flags
    )
    if processes > 1:
      with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
      argv.append("--distributed")
      environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
      environment["JAX_NUM_PROCESSES"] = str(processes)
    if shell:
      argv = ["bash", "-c", f'{shell}; exec "$@"', "bash", *argv]
    self.workdir = pathlib.Path(workdir)
    self.files, self.processes = [], []
    for index in range(processes):
      stem = name or self.workdir.name
      file = self.workdir.parent / f"{stem}.stderr{index}"
      is_last = index == processes - 1
      with file.open("w") as stderr:
        process = subprocess.Popen(
          ["nice", "-n", str(niceness), *argv, *(last if is_last else ())],
          env={**environment, "JAX_PROCESS_ID": str(index)},
          cwd=_ROOT,
          stdout=subprocess.DEVNULL,
          stderr=stderr,
        )
      self.files.append(file)
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

  def errors(self, index: int = 0) -> list[str]:
    """Lines that begin with "error:"."""
    lines = self.said(index).splitlines()
    return [line for line in lines if line.startswith("error:")]

  def wait_for(self, condition: Any, timeout: float = 240) -> bool:
    """Waits until a condition holds; False if all processes ended before."""
    deadline = time.monotonic() + timeout
    while not condition():
      if all(process.poll() is not None for process in self.processes):
        return False
      assert time.monotonic() < deadline, self.said()
      time.sleep(0.02)
    return True

  def wait_for_step(self, step: int) -> bool:
    """Waits until a row of a step is written."""
    return self.wait_for(lambda: any(s >= step for s, _ in rows(self.workdir)))


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


def state(workdir: str | pathlib.Path, step: int | None = None) -> dict:
  """All arrays of a checkpoint, and its position, as numpy arrays."""
  step = steps.find_step(str(workdir), step)
  folder = steps.step_folder(str(workdir), step)
  names = [n for n in ("params", "train", "ema") if (folder / n).exists()]
  found = {}
  for name in names:
    # As numpy arrays, whatever devices the run had.
    with ocp.PyTreeCheckpointer() as reader:
      described = reader.metadata(folder / name).item_metadata.tree
      how = ocp.RestoreArgs(restore_type=np.ndarray)
      args = jax.tree.map(lambda _, how=how: how, described)
      tree = reader.restore(folder / name, restore_args=args)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
      found[f"{name}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
  stored = steps.read_json_item(workdir, step, "data")
  return {**found, "position": np.asarray(stored["position"])}


def differences(
  workdir: str, whole: str, ignore: Sequence[str] = (), rtol: float = 0.0
) -> list[str]:
  """How a disturbed run that finished differs from one that was not.

  Args:
    workdir: of the disturbed run.
    whole: of the other.
    ignore: names of metrics that may differ.
    rtol: of metrics and arrays; 0 asks for the same bits.

  Returns:
    Names of arrays and rows that differ.
  """

  def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, str) or ours is None or theirs is None:
      return ours == theirs
    if not rtol:
      return np.array_equal(ours, theirs)
    return np.allclose(ours, theirs, rtol=rtol, atol=rtol)

  pairs = [(state(workdir), state(whole)), (rows(workdir), rows(whole))]
  wrong = []
  for ours, theirs in pairs:
    wrong += [str(k) for k in ours.keys() ^ theirs.keys()]
    for key in ours.keys() & theirs.keys():
      one, other = ours[key], theirs[key]
      if isinstance(one, dict):
        names = (one.keys() | other.keys()) - set(ignore)
        equal = all(same(one.get(name), other.get(name)) for name in names)
      else:
        equal = same(one, other)
      if not equal:
        wrong.append(str(key))
  return wrong
