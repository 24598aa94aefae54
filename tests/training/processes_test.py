"""Two processes train together, and draw; one process continues their run."""

import functools
import pathlib
import tempfile

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler, sample_files, sample_images
from moh_jax.runtime import checkpoint
from moh_jax.runtime.mesh import make_mesh
from moh_jax.training.train import train
from tests import two_processes
from tests.training import tiny

_IMAGES, _BATCH = 13, 8
_MESHES = {
  "data": {"data": -1},
  # Both processes hold the whole batch, so both must read it whole.
  "tensor": {"data": 1, "tensor": -1},
}
_config = functools.partial(tiny.llm_config, model={"num_kv_heads": 4})
_dit_config = functools.partial(tiny.dit_config, model=tiny.ALIKE["dit"])
_CHILD = """
import pathlib, sys
from moh_jax.runtime import processes
processes.join()
from tests.training import processes_test
processes_test.train_and_draw(pathlib.Path(sys.argv[1]))
"""


def train_and_draw(root: pathlib.Path) -> None:
  """What both processes do: a run on each mesh, then images in one file."""
  assert (jax.process_count(), jax.device_count()) == (2, 4)
  for name, mesh in _MESHES.items():
    train(_config(mesh=mesh), str(root / name))
  mesh = make_mesh(_dit_config(mesh={"data": -1}).mesh)
  restored = restore(str(root / "dit"), mesh=mesh)
  sample_files(
    Sampler(restored, mesh=mesh),
    _IMAGES,
    str(root / "images.npz"),
    batch_size=_BATCH,
    settings={},
  )


class ProcessesTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    config = _dit_config()
    params, metadata = tiny.random_params(config), checkpoint.Metadata(config)
    checkpoint.save_params(cls.root / "dit", params, metadata)
    two_processes.call("-c", _CHILD, str(cls.root))
    tiny.train(_config(), cls.root / "alone")

  @parameterized.parameters(*_MESHES)
  @pytest.mark.integration
  def test_two_processes_train_and_one_continues(self, name):
    losses = [
      [row["loss"] for row in tiny.rows(self.root / run, "train")]
      for run in (name, "alone")
    ]
    self.assertLen(losses[0], 4)
    np.testing.assert_allclose(*losses, rtol=2e-5)
    resumed = tiny.train(_config(train={"steps": 5}), self.root / name)
    self.assertEqual(int(resumed.state.step), 5)

  @pytest.mark.integration
  def test_two_processes_draw_what_one_draws(self):
    mesh = make_mesh(_dit_config().mesh, jax.devices()[:1])
    restored = restore(str(self.root / "dit"))
    alone = sample_images(Sampler(restored, mesh=mesh), _IMAGES, _BATCH)
    with np.load(self.root / "images.npz") as stored:
      np.testing.assert_array_equal(stored["arr_0"], alone)
      np.testing.assert_array_equal(stored["arr_1"], np.arange(_IMAGES) % 10)
    self.assertFalse((self.root / "images.npz.parts").exists())
