"""Processes that work for another one: signals of the terminal, and its end."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

from absl.testing import absltest

from moh_jax.runtime.workers import map_ahead, process_pool

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

  def test_few_results_wait_for_their_turn(self):
    started = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      results = map_ahead(pool, lambda x: started.append(x) or -x, range(9), 4)
      self.assertEqual(next(results), 0)
      pool.submit(int).result()  # behind those that are submitted
      self.assertLessEqual(len(started), 4)
      self.assertEqual(list(results), [-x for x in range(1, 9)])

  def test_what_waits_is_not_begun_after_an_error(self):
    begun, may_end = [], threading.Semaphore(1)

    def work(item):
      begun.append(item)
      may_end.acquire(timeout=60)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      results = map_ahead(pool, work, range(9), 4)
      next(results)
      results.close()
      may_end.release(9)
    self.assertLessEqual(len(begun), 2)


if __name__ == "__main__":
  absltest.main()
