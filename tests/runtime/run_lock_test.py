"""A working directory belongs to one run, until that run is gone."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from unittest import mock

from absl.testing import parameterized

from moh_jax.runtime import run_lock
from moh_jax.runtime.run_lock import RunLock, RunningError

_HOLD = """
import sys
from moh_jax.runtime.run_lock import RunLock
lock = RunLock(sys.argv[1])
lock.take()
print("held", flush=True)
sys.stdin.read()
"""


class RunLockTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = self.create_tempdir().full_path
    self.file = pathlib.Path(self.workdir) / run_lock.NAME

  def _take(self):
    lock = RunLock(self.workdir)
    lock.take()
    self.addCleanup(lock.release)
    return lock

  def _of_another_host(self, age):
    """A lock that a run on another machine renewed `age` seconds ago."""
    owner = {"host": "elsewhere", "pid": 7, "boot": "other", "token": "t"}
    self.file.write_text(json.dumps(owner))
    then = time.time() - age
    os.utime(self.file, (then, then))

  def test_stopped_process_keeps_its_lock_and_a_dead_one_does_not(self):
    child = subprocess.Popen(
      [sys.executable, "-c", _HOLD, self.workdir],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(child.communicate)
    self.assertEqual(child.stdout.readline(), "held\n")
    child.send_signal(signal.SIGSTOP)
    then = time.time() - 2 * run_lock.STALE_SECONDS
    os.utime(self.file, (then, then))
    pattern = f"{self.workdir} belongs to .*: process {child.pid} on host "
    for attempt in (self._take, lambda: run_lock.check_free(self.workdir)):
      with self.assertRaisesRegex(RunningError, pattern):
        attempt()
    child.kill()
    child.wait()
    for _ in range(2):
      self._take().release()
    run_lock.check_free(self.workdir)

  def test_lock_of_another_host_is_respected_unless_it_is_stale(self):
    for age in (1, -10_000):  # also of a clock that is ahead
      self._of_another_host(age)
      with self.assertRaisesRegex(RunningError, "process 7 on host elsewhere"):
        self._take()
    with self.assertRaisesRegex(RunningError, f"ahead.*remove {self.file}"):
      self._take()
    self._of_another_host(age=10_000)  # the clock jumped: it is renewed
    with (
      mock.patch.object(run_lock.time, "sleep", lambda _: os.utime(self.file)),
      self.assertRaises(RunningError),
    ):
      self._take()
    self._of_another_host(age=2 * run_lock.STALE_SECONDS)
    with mock.patch.object(run_lock, "_WATCH_SECONDS", 0.3):
      self._take().check()

  def test_run_that_was_taken_over_finds_out(self):
    with mock.patch.object(run_lock, "RENEW_SECONDS", 0.01):
      lock = self._take()
      self._of_another_host(age=0)
      with self.assertRaisesRegex(RunningError, "taken over"):
        for _ in range(1000):
          lock.check()
          time.sleep(0.01)
    before = self.file.read_text()
    lock.release()
    self.assertEqual(self.file.read_text(), before)

  @parameterized.parameters(b"", b"{", b"[1]", b"[" * 5000, b"\xff" * 9)
  def test_damaged_lock_that_nobody_holds_is_free(self, content):
    self.file.write_bytes(content)
    self._take()

  def test_links_and_pipes_are_refused(self):
    other = self.create_tempfile().full_path
    self.file.symlink_to(other)
    with self.assertRaisesRegex(OSError, run_lock.NAME):
      self._take()
    self.file.unlink()
    os.mkfifo(self.file)
    with self.assertRaisesRegex(OSError, "regular file"):
      self._take()
