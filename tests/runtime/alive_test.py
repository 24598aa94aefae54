import threading
from unittest import mock

from absl.testing import absltest

from moh_jax.runtime import alive


class AliveTest(absltest.TestCase):
  def test_says_so_again_and_again_until_the_work_is_done(self):
    told, threads = threading.Semaphore(0), threading.active_count()
    log = mock.patch.object(alive._LOG, "warning", lambda *_: told.release())
    with mock.patch.object(alive, "_SECONDS", 1e-3), log:
      with alive.alive("counting"):
        self.assertTrue(told.acquire(timeout=60) and told.acquire(timeout=60))
    self.assertEqual(threading.active_count(), threads)

  def test_names_the_work_and_hides_no_error(self):
    def fails():
      while not logs.output:
        threading.Event().wait(1e-3)
      raise ValueError("broken")

    with mock.patch.object(alive, "_SECONDS", 1e-3):
      with self.assertLogs(alive._LOG, "WARNING") as logs:
        with self.assertRaisesRegex(ValueError, "broken"):
          with alive.alive("counting files"):
            fails()
    self.assertRegex(logs.output[0], "still counting files, 0 s")
