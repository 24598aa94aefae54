"""Processes that work for another one: signals of the terminal, and its end."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

from absl.testing import absltest

from moh_jax.runtime.workers import process_pool

_PROGRAM = """
import os, sys, time
from moh_jax.runtime import signals, workers

def work(_):
  print(os.getpid(), flush=True)
  time.sleep(600)

if __name__ == "__main__":
  try:
    with signals.handled(), workers.process_pool(2) as pool:
      for done in [pool.submit(work, i) for i in range(2)]:
        done.result()
  except signals.StoppedError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.status)
"""


def _add(*values):
  return sum(values, start=_ADDED[0])


_ADDED = [0]


def _begin(value):
  _ADDED[0] = value


class PoolTest(absltest.TestCase):
  def _start(self):
    """A program whose two workers sleep: its process, and their ids."""
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "program.py").write_text(textwrap.dedent(_PROGRAM))
    child = subprocess.Popen(
      [sys.executable, str(folder / "program.py")],
      env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
    )
    self.addCleanup(child.communicate)
    self.addCleanup(child.kill)
    return child, [int(child.stdout.readline()) for _ in range(2)]

  def _check_gone(self, workers):
    left = [pathlib.Path(f"/proc/{worker}") for worker in workers]
    latest = time.monotonic() + 60
    while left and time.monotonic() < latest:
      time.sleep(0.05)
      left = [path for path in left if path.exists()]
    self.assertEmpty(left)

  def test_ctrl_c_is_one_line_and_ends_the_workers_at_once(self):
    child, workers = self._start()
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    self.assertEqual(err, "error: stopped by SIGINT\n")
    self.assertEqual(child.returncode, 128 + signal.SIGINT)
    self._check_gone(workers)

  def test_workers_end_with_what_was_killed(self):
    child, workers = self._start()
    child.kill()
    child.wait()
    self._check_gone(workers)

  def test_workers_begin_and_answer(self):
    with process_pool(1, _begin, 5) as pool:
      self.assertEqual(pool.submit(_add, 1, 2).result(), 8)


if __name__ == "__main__":
  absltest.main()
