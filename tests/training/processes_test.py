"""Two processes train together, and draw; one process continues their run."""

import json
import os
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler, sample_images, sample_npz
from moh_jax.training import checkpoint, loop, sharding
from tests.training import tiny

_IMAGES, _BATCH = 13, 8

_CHILD = """
import sys
from moh_jax.cli.processes import join_processes
join_processes()
import jax
assert jax.process_count() == 2, jax.process_count()
from moh_jax.training import loop
from tests.training import tiny
from tests.training import processes_test
mesh = {"data": 1, "tensor": -1} if sys.argv[2] == "tensor" else {"data": -1}
loop.train(tiny.deterministic_config(mesh=mesh), sys.argv[1])
if sys.argv[2] == "data":
  processes_test.draw_to_file(sys.argv[1])
"""


def draw_to_file(workdir: str) -> None:
  """What both processes do to draw images into one file."""
  mesh = sharding.make_mesh(tiny.dit_config(mesh={"data": -1}).mesh)
  restored = restore(os.path.join(workdir, "dit"), mesh=mesh)
  sample_npz(
    Sampler(restored, mesh=mesh),
    _IMAGES,
    os.path.join(workdir, "images.npz"),
    batch_size=_BATCH,
    settings={},
  )


def _save_dit(workdir: str) -> None:
  config = tiny.dit_config()
  checkpoint.save_params(
    os.path.join(workdir, "dit"),
    tiny.random_params(config),
    checkpoint.Metadata(config),
  )


def _losses(workdir: str) -> list[float]:
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [row["loss"] for row in rows if row["split"] == "train"]


class ProcessesTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = cls.enterClassContext(tempfile.TemporaryDirectory())

  def _workdir(self, axis: str) -> str:
    """Where two processes have run; they are started once for all tests."""
    workdir = os.path.join(self.root, axis)
    if os.path.exists(workdir):
      return workdir
    _save_dit(workdir)
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
    return workdir

  # "tensor": both processes hold the whole batch, so both must read it whole.
  @parameterized.parameters("data", "tensor")
  def test_two_processes_train_and_one_continues(self, axis):
    workdir = self._workdir(axis)
    alone = self.create_tempdir().full_path
    one = jax.devices()[:1]
    loop.train(tiny.deterministic_config(), alone, devices=one)
    np.testing.assert_allclose(_losses(workdir), _losses(alone), rtol=2e-5)

    longer = tiny.deterministic_config(train={"steps": 5})
    resumed = loop.train(longer, workdir, devices=one)
    self.assertEqual(int(resumed.state.step), 5)

  def test_two_processes_draw_what_one_draws(self):
    workdir = self._workdir("data")
    mesh = sharding.make_mesh(tiny.dit_config().mesh, jax.devices()[:1])
    restored = restore(os.path.join(workdir, "dit"))
    alone = sample_images(Sampler(restored, mesh=mesh), _IMAGES, _BATCH)
    with np.load(os.path.join(workdir, "images.npz")) as stored:
      np.testing.assert_array_equal(stored["arr_0"], alone)
      np.testing.assert_array_equal(stored["arr_1"], np.arange(_IMAGES) % 10)
    self.assertFalse(os.path.exists(os.path.join(workdir, "images.npz.parts")))


if __name__ == "__main__":
  absltest.main()
