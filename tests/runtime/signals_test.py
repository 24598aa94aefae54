"""Signals end a command in one line, also during long C++ calls."""

import signal
import subprocess
import sys
import textwrap
import time

from absl.testing import parameterized

_PROGRAM = """
  import ctypes, sys, time
  from moh_jax.runtime import signals
  from moh_jax.cli import main
  signals._PATIENCE_SECONDS = 0.2, {patience}

  def sleep_on():  # as JAX may drop what a handler raises
    try:
      print("asleep", flush=True)
      time.sleep(60)
    except BaseException:
      time.sleep(60)

  def work():
    try:
      print("working", flush=True)
      {work}
    finally:
      print("cleaning up", flush=True)
      {clean_up}

  sys.exit(main.report_errors(work, False))
"""


_DROPPING = """
class _Dropping:
  def __del__(self):
    os.kill(os.getpid(), 15)
    for _ in range(1000):
      pass
"""


class SignalsTest(parameterized.TestCase):
  def test_what_python_drops_is_raised_again(self):
    work = "_Dropping(); print('working', flush=True); time.sleep(60)"
    program = textwrap.dedent(_PROGRAM).format(
      work=work, clean_up="pass", patience=60
    )
    program = f"import os\n{_DROPPING}\n{program}"
    ended = subprocess.run(
      [sys.executable, "-c", program],
      capture_output=True,
      text=True,
      timeout=60,
    )
    self.assertEqual(ended.stderr, "error: stopped by SIGTERM\n")
    self.assertEqual(ended.returncode, 128 + signal.SIGTERM)

  def _start(self, work, clean_up="pass", patience=60):
    program = textwrap.dedent(_PROGRAM).format(
      work=work, clean_up=clean_up, patience=patience
    )
    child = subprocess.Popen(
      [sys.executable, "-c", program],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(child.communicate)
    self.addCleanup(child.kill)
    self.assertEqual(child.stdout.readline(), "working\n")
    return child

  def _end(self, child, number, line):
    """Sends the signal that ends it; returns what else it printed."""
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    self.assertRegex(err, f"^error: stopped by {number.name}{line}\n$")
    self.assertEqual(child.returncode, 128 + number)
    return out

  @parameterized.parameters(signal.SIGTERM, signal.SIGINT)
  def test_first_signal_cleans_up_and_says_why(self, number):
    child = self._start("time.sleep(60)")
    self.assertEqual(self._end(child, number, ""), "cleaning up\n")

  @parameterized.parameters(signal.SIGTERM, signal.SIGINT)
  def test_second_signal_ends_what_cleans_up_too_long(self, number):
    child = self._start("time.sleep(60)", clean_up="time.sleep(60)")
    child.send_signal(number)
    self.assertEqual(child.stdout.readline(), "cleaning up\n")
    self._end(child, number, ", at once")

  def test_signal_during_a_long_call_of_a_library_ends_it(self):
    # Waits in C, without Python's lock and in spite of signals, as XLA does.
    child = self._start(
      "lock = ctypes.create_string_buffer(64); "
      "take = ctypes.CDLL(None).pthread_mutex_lock; take(lock); take(lock)"
    )
    time.sleep(0.5)  # on a busy machine it may not be in C yet
    self._end(child, signal.SIGTERM, "(, during a computation)?")

  def test_dropped_signal_ends_the_command_a_little_later(self):
    child = self._start("sleep_on()", patience=0.2)
    self.assertEqual(child.stdout.readline(), "asleep\n")
    self._end(child, signal.SIGTERM, ", during a computation")
