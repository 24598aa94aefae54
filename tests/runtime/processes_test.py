"""Processes that differ are named; signals end a command in one line."""

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.runtime import processes
from moh_jax.runtime.batches import gather
from tests import two_processes

_CHILD = "from tests.runtime import processes_test as t; t.compare()"
_COMMAND = """
  import ctypes, sys, time
  from moh_jax.cli import main

  def work():
    try:
      print("working", flush=True)
      time.sleep(60)
    finally:
      print("cleaning up", flush=True)
      {clean_up}

  sys.exit(main.report_errors(work, False))
"""
# Waits in C, without Python's lock and in spite of signals, as XLA does.
_IN_C = (
  "lock = ctypes.create_string_buffer(64); "
  "take = ctypes.CDLL(None).pthread_mutex_lock; take(lock); take(lock)"
)


def compare() -> None:
  """What both processes do: agree, then differ; prints what was said."""
  processes.join()
  index = jax.process_index()
  processes.agree({"config": {"seed": 3, "tags": ["a"]}})
  try:
    processes.agree({"config": {"seed": index, "same": 1}, "at": [2][index:]})
  except ValueError as error:
    print(error)
  own = jax.device_put(np.full(2, index), jax.local_devices()[0])
  gathered = gather([own, np.arange(index)])
  print([array.tolist() for array in gathered])
  sys.stdout.flush()


class AgreementTest(absltest.TestCase):
  def test_what_differs_is_named_in_all_processes(self):
    said = [
      re.sub(r"\[Gloo\].*\n", "", text)
      for text in two_processes.call("-c", _CHILD)
    ]
    self.assertEqual(
      said,
      [
        "process 1 of the run differs from process 0, here and there: at: [] "
        "here, [2] there; config.seed: 1 here, 0 there\n"
        f"{[[index] * 2, [*range(index)]]}\n"
        for index in range(2)
      ],
    )


class SignalsTest(parameterized.TestCase):
  def test_one_during_the_collection_of_garbage_waits_for_its_end(self):
    class Slow:
      def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        deleted.append(True)

    deleted = []
    with processes.handled(), self.assertRaises(processes.StoppedError):
      Slow()
      time.sleep(10)  # ends when the signal is raised again
    self.assertEqual(deleted, [True])

  def test_one_whose_exception_was_dropped_is_found_later(self):
    with processes.handled():
      with contextlib.suppress(processes.StoppedError):  # as in a callback
        signal.raise_signal(signal.SIGTERM)
      with processes.deferred() as was_asked:
        self.assertTrue(was_asked())
    with processes.deferred() as was_asked:
      self.assertFalse(was_asked())

  def _start(self, clean_up):
    program = textwrap.dedent(_COMMAND).format(clean_up=clean_up)
    child = subprocess.Popen(
      [sys.executable, "-c", program],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self.addCleanup(child.communicate)
    self.addCleanup(child.kill)
    self.assertEqual(child.stdout.readline(), "working\n")
    child.send_signal(signal.SIGTERM)
    self.assertEqual(child.stdout.readline(), "cleaning up\n")
    return child

  def test_first_signal_cleans_up_and_says_why(self):
    child = self._start("pass")
    _, err = child.communicate(timeout=60)
    self.assertEqual(err, "error: stopped by SIGTERM\n")
    self.assertEqual(child.returncode, 128 + signal.SIGTERM)

  @parameterized.parameters("time.sleep(60)", _IN_C)
  def test_second_signal_ends_it_at_once(self, clean_up):
    child = self._start(clean_up)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    self.assertEqual(err, "error: stopped by SIGINT, at once\n")
    self.assertEqual(child.returncode, 128 + signal.SIGINT)
