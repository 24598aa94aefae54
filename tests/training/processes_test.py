"""Two processes train together, and draw; one process continues their run."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler, sample_files, sample_images
from moh_jax.runtime.mesh import make_mesh
from moh_jax.training.train import train
from tests import folders, two_processes
from tests.training import tiny

_IMAGES, _BATCH = 13, 8
# Each process reads half of a batch; its two devices share the heads.
# `batches_test` has the rows of processes that hold the same ones.
_MESH = {"data": 2, "tensor": 2}
_config = functools.partial(tiny.llm_config, train={"steps": 2})
_DIT = tiny.dit_config(model=tiny.ALIKE["dit"], sample={"steps": "2"})
_CHILD = """
import pathlib, sys
from moh_jax.runtime import processes
processes.join()
from tests.training import processes_test
processes_test.train_and_draw(pathlib.Path(sys.argv[1]))
"""


def train_and_draw(root: pathlib.Path) -> None:
  """What both processes do: a run, then images in one file."""
  assert (jax.process_count(), jax.device_count()) == (2, 4)
  train(_config(mesh=_MESH), str(root / "run"))
  mesh = make_mesh(tiny.changed(_DIT, mesh={"data": -1}).mesh)
  sampler = Sampler(restore(str(root / "base"), mesh=mesh), mesh=mesh)
  images = str(root / "images.npz")
  sample_files(sampler, _IMAGES, images, batch_size=_BATCH, settings={})


class ProcessesTest(folders.FolderTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = cls.shared_folder()
    tiny.save(cls.folder, _DIT)
    two_processes.call("-c", _CHILD, str(cls.folder))

  @pytest.mark.integration
  def test_two_processes_train_and_one_continues(self):
    tiny.train(_config(), self.folder / "alone")
    losses = [tiny.losses(self.folder / run) for run in ("run", "alone")]
    self.assertLen(losses[0], 2)
    np.testing.assert_allclose(*losses, rtol=2e-5)
    resumed = tiny.train(_config(train={"steps": 3}), self.folder / "run")
    self.assertEqual(int(resumed.state.step), 3)

  @pytest.mark.integration
  def test_two_processes_draw_what_one_draws(self):
    mesh = make_mesh(_DIT.mesh, jax.devices()[:1])
    sampler = Sampler(restore(str(self.folder / "base"), mesh=mesh), mesh=mesh)
    alone = sample_images(sampler, _IMAGES, _BATCH)
    with np.load(self.folder / "images.npz") as stored:
      np.testing.assert_array_equal(stored["arr_0"], alone)
      np.testing.assert_array_equal(stored["arr_1"], np.arange(_IMAGES) % 10)
    self.assertFalse((self.folder / "images.npz.parts").exists())
