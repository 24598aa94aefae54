"""Two processes train together; one process continues their run."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.training import loop
from tests.training import tiny

_CHILD = """
import sys
from moh_jax.cli.train import join_processes
join_processes()
import jax
assert jax.process_count() == 2, jax.process_count()
from moh_jax.training import loop
from tests.training import tiny
mesh = {"data": 1, "tensor": -1} if sys.argv[2] == "tensor" else {"data": -1}
loop.train(tiny.deterministic_config(mesh=mesh), sys.argv[1])
"""


def _losses(workdir: str) -> list[float]:
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [row["loss"] for row in rows if row["split"] == "train"]


class ProcessesTest(parameterized.TestCase):
  # "tensor": both processes hold the whole batch, so both must read it whole.
  @parameterized.parameters("data", "tensor")
  def test_two_processes_train_and_one_continues(self, axis):
    workdir = self.create_tempdir().full_path
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {
      **os.environ,
      "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
    }
    children = [
      subprocess.Popen(
        [sys.executable, "-c", _CHILD, workdir, axis],
        env={**environment, "JAX_PROCESS_ID": str(index)},
      )
      for index in range(2)
    ]
    self.assertEqual([child.wait(timeout=300) for child in children], [0, 0])

    alone = self.create_tempdir().full_path
    one = jax.devices()[:1]
    loop.train(tiny.deterministic_config(), alone, devices=one)
    np.testing.assert_allclose(_losses(workdir), _losses(alone), rtol=2e-5)

    longer = tiny.deterministic_config(train={"steps": 5})
    resumed = loop.train(longer, workdir, devices=one)
    self.assertEqual(int(resumed.state.step), 5)


if __name__ == "__main__":
  absltest.main()
