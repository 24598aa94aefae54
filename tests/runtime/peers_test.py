"""Processes that differ, are late or are silent are named."""

import sys
import threading
import time
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest
from orbax.checkpoint import multihost

from moh_jax.runtime import cluster, peers, sharding
from tests import two_processes

_CHILD = """
import sys
sys.path.insert(0, ".")
from tests.runtime import peers_test
peers_test.compare()
"""


def compare() -> None:
  """What both processes do: agree, then differ; prints what was said."""
  cluster.join(cluster.given_place())
  index = jax.process_index()
  peers.agree({"config": {"seed": 3, "tags": ["a"]}})
  peers.agree({"config": {"seed": 4}})
  try:
    peers.agree({"config": {"seed": index, "same": 1}, "steps": [2][index:]})
  except ValueError as error:
    print(error)
  own = jax.device_put(np.full(2, index), jax.local_devices()[0])
  gathered = sharding.gather([own, np.arange(index)])
  print([array.tolist() for array in gathered])
  sys.stdout.flush()


class AgreementTest(absltest.TestCase):
  def test_what_differs_is_named_in_all_processes(self):
    said = two_processes.call("-c", _CHILD)
    self.assertEqual(
      said,
      [
        "the 2 processes of the run differ: config.seed: 0 in process 0, 1 in "
        "process 1; steps: [2] in process 0, [] in process 1\n"
        f"{[[index] * 2, [*range(index)]]}\n"
        for index in range(2)
      ],
    )


class PeersTest(absltest.TestCase):
  def test_late_process_is_named_and_a_silent_one_ends_the_run(self):
    values, left = {}, threading.Event()
    store = mock.Mock()  # JAX's key-value store, in this process
    store.key_value_set = lambda key, value, **_: values.update({key: value})
    store.key_value_dir_get = lambda _: list(values.items())
    with (
      mock.patch.object(peers, "_BEAT_SECONDS", 0.02),
      mock.patch.object(peers, "SILENT_SECONDS", 0.5),
      mock.patch.object(peers, "LATE_SECONDS", 0.2),
      mock.patch.object(peers.jax, "process_count", return_value=3),
      mock.patch.object(
        multihost, "get_jax_distributed_client", return_value=store
      ),
      mock.patch.object(peers.os, "_exit", lambda _: left.set()),
      mock.patch.object(peers, "_start_witness"),
      mock.patch("builtins.print") as said,
      self.assertLogs("moh_jax", "WARNING") as logs,
      peers.Peers(self.create_tempdir().full_path, lambda: "step 5") as watch,
    ):
      watch.at(8)
      for beat in range(75):
        for process, step in ((1, 8), (2, 7)):
          if process == 1 or beat < 35:  # the other one becomes silent
            store.key_value_set(f"{watch._keys}{process}", f"{step} {beat}")
        time.sleep(0.02)
        if beat == 34:
          self.assertFalse(left.is_set())
    (line,) = logs.output
    self.assertRegex(line, "process 2 is late: it is at step 7 for .* step 8")
    self.assertTrue(left.is_set())
    self.assertRegex(
      said.call_args_list[0].args[0],
      "process 2 of the 3 processes of the run has given no.*step 5",
    )
