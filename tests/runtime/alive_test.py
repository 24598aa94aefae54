import threading
import time
from unittest import mock

from absl.testing import absltest

from moh_jax.runtime import alive


class AliveTest(absltest.TestCase):
  def test_says_so_again_and_again_until_the_work_is_done_or_fails(self):
    threads = threading.active_count()

    def fails():
      while len(logs.output) < 2:
        time.sleep(1e-3)
      raise ValueError("broken")

    with mock.patch.object(alive, "_SECONDS", 1e-3):
      with self.assertLogs(alive._LOG, "WARNING") as logs:
        with self.assertRaisesRegex(ValueError, "broken"):
          with alive.alive("counting files"):
            fails()
    self.assertRegex(logs.output[0], "still counting files, 0 s")
    self.assertEqual(threading.active_count(), threads)
