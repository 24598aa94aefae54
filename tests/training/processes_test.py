"""Two processes train together, and draw; one process continues their run."""

import functools
import json
import os
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler, sample_files, sample_images
from moh_jax.runtime import checkpoint, sharding
from moh_jax.training.train import train
from tests import two_processes
from tests.training import tiny

_IMAGES, _BATCH = 13, 8

_CONFIGS = {
  "vit": functools.partial(
    tiny.deterministic_config,
    model=tiny.ALIKE["vit"],
    optim={"schedule": "constant"},  # a longer run has the same programs
  ),
  "llm": functools.partial(tiny.llm_config, model={"num_kv_heads": 4}),
}
_MESHES = {
  "vit": {"data": -1},
  # Both processes hold the whole batch, so both must read it whole.
  "llm": {"data": 1, "tensor": -1, "max_imbalance": 2.0},
}
_dit_config = functools.partial(tiny.dit_config, model=tiny.ALIKE["dit"])

_CHILD = """
import sys
from moh_jax.runtime import cluster
cluster.join(cluster.given_place())
from tests.training import processes_test
processes_test.train_and_draw(sys.argv[1])
"""


def train_and_draw(root: str) -> None:
  """What both processes do: a run of each family, then images in one file."""
  assert (jax.process_count(), jax.device_count()) == (2, 4)
  for family, make_config in _CONFIGS.items():
    config = make_config(mesh=_MESHES[family])
    train(config, os.path.join(root, family))
  mesh = sharding.make_mesh(_dit_config(mesh={"data": -1}).mesh)
  restored = restore(os.path.join(root, "dit"), mesh=mesh)
  sample_files(
    Sampler(restored, mesh=mesh),
    _IMAGES,
    os.path.join(root, "images.npz"),
    batch_size=_BATCH,
    settings={},
  )


def _save_dit(root: str) -> None:
  config = _dit_config()
  checkpoint.save_params(
    os.path.join(root, "dit"),
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
    _save_dit(cls.root)
    two_processes.call("-c", _CHILD, cls.root)

  @parameterized.parameters(*_CONFIGS)
  def test_two_processes_train_and_one_continues(self, family):
    make_config, workdir = _CONFIGS[family], os.path.join(self.root, family)
    alone = self.create_tempdir().full_path
    one = jax.devices()[:1]
    train(make_config(), alone, devices=one)
    np.testing.assert_allclose(_losses(workdir), _losses(alone), rtol=2e-5)

    longer = make_config(train={"steps": 5})
    resumed = train(longer, workdir, devices=one)
    self.assertEqual(int(resumed.state.step), 5)

  def test_two_processes_draw_what_one_draws(self):
    mesh = sharding.make_mesh(_dit_config().mesh, jax.devices()[:1])
    restored = restore(os.path.join(self.root, "dit"))
    alone = sample_images(Sampler(restored, mesh=mesh), _IMAGES, _BATCH)
    with np.load(os.path.join(self.root, "images.npz")) as stored:
      np.testing.assert_array_equal(stored["arr_0"], alone)
      np.testing.assert_array_equal(stored["arr_1"], np.arange(_IMAGES) % 10)
    parts = os.path.join(self.root, "images.npz.parts")
    self.assertFalse(os.path.exists(parts))


if __name__ == "__main__":
  absltest.main()
