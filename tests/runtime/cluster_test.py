"""How a process finds the first one of its run."""

import os
import socket
import subprocess
import sys
import threading
from unittest import mock

from absl.testing import parameterized

from moh_jax.runtime import cluster


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


class ClusterTest(parameterized.TestCase):
  @parameterized.parameters(
    ("host0", "2", "1", "must be HOST:PORT"),
    ("host0:70000", "2", "1", "port of 1 to 65535"),
    ("host0:1234", "0", "0", "JAX_NUM_PROCESSES=0 must be at least 1"),
    ("host0:1234", "2", "2", "JAX_PROCESS_ID=2 must be at least 0"),
    ("host0:1234", "2", "-1", "JAX_PROCESS_ID=-1 must be at least 0"),
    ("host0:1234", "two", "1", "'two' must be a whole number"),
  )
  def test_wrong_places_are_refused(self, *given):
    *values, message = given
    with mock.patch.dict(os.environ, zip(cluster.VARIABLES, values)):
      with self.assertRaisesRegex(ValueError, message):
        cluster.given_place()

  def test_first_process_may_be_late(self):
    place = f"127.0.0.1:{_free_port()}"
    later = socket.socket()
    self.addCleanup(later.close)
    later.bind(("127.0.0.1", int(place.partition(":")[2])))
    timer = threading.Timer(0.7, later.listen)  # refused until then
    timer.start()
    with mock.patch("jax.distributed.initialize") as initialize:
      cluster.join(cluster.Place(place, 2, 1), seconds=10)
    timer.join()
    initialize.assert_called_once_with(place, 2, 1, initialization_timeout=330)

  def test_a_process_that_never_comes_is_one_line(self):
    code = (
      "from moh_jax.runtime import cluster; cluster._ALL_SECONDS = 1; "
      f"cluster.join(cluster.Place('127.0.0.1:{_free_port()}', 2, 0), 1)"
    )
    ended = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    self.assertEqual(ended.returncode, 2)
    self.assertRegex(
      ended.stderr.strip().splitlines()[-1],
      r"^error: .* the 2 processes .* process 0 \(127.0.0.1:\d+\) within 1 s",
    )

  def test_place_comes_from_the_cluster_and_a_closed_port_is_one_line(self):
    slurm = {
      "SLURM_JOB_ID": "12345",
      "SLURM_STEP_NODELIST": "127.0.0.1",
      "SLURM_NTASKS": "2",
      "SLURM_PROCID": "1",
      "SLURM_LOCALID": "0",
      "JAX_COORDINATOR_PORT": str(_free_port()),
    }
    message = (
      r"process 1 of 2 cannot reach process 0 at 127.0.0.1:.* within 1 s"
    )
    with mock.patch.dict(os.environ, slurm):
      with self.assertRaisesRegex(OSError, message):
        cluster.join(cluster.given_place(), seconds=1)
