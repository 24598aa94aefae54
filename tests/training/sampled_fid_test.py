"""FID of a run's own samples."""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import SampleConfig
from moh_jax.evaluation.fid import Gaussian, frechet_distance, moments
from moh_jax.inference.restore import Restored
from moh_jax.inference.sample import Sampler, sample_images
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.training import denoising
from moh_jax.training.denoising import make_fid
from moh_jax.training.train import train
from tests.training import tiny

_NUM, _DIM = 13, 6  # images, the last batch is not full
_FILES = {"fid_reference": "stats.npz", "fid_inception": "weights.pth"}
_REFERENCE = Gaussian(np.full(_DIM, 90.0), 50 * np.eye(_DIM))


def _extract(images, mesh=None):
  del mesh
  return _features(images)


@jax.jit
def _features(images):
  """Features of [B, 8, 8, 3] images: means of two rows of each channel."""
  assert images.dtype == jnp.uint8
  rows = images.astype(jnp.float32).mean(2)
  return rows[:, :2].reshape(len(images), _DIM)


def _config(**sections):
  sample = {"fid_images": _NUM, "steps": "3", **_FILES}
  return tiny.dit_config(sample=sample, eval={"batch_size": 8}, **sections)


@functools.cache
def _fid(devices, seed=0):
  config = _config(mesh={"data": devices})
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:devices])
  params = tiny.random_params(config, seed)
  with sharding.use_mesh(mesh):
    params = jax.device_put(params, sharding.replicated(mesh))
    return make_fid(config, _REFERENCE, _extract)(params, mesh)["fid"]


class SampledFidTest(parameterized.TestCase):
  def test_is_that_of_the_sampler_s_images(self):
    config = _config(mesh={"data": 1})
    model, _ = make_model(config)
    restored = Restored(config, model, tiny.random_params(config), 0, ())
    sampler = Sampler(restored, seed=config.train.seed)
    images = sample_images(sampler, _NUM, 8).repeat(3, -1)
    found = moments(np.asarray(_extract(images))).gaussian()
    expected = frechet_distance(found, _REFERENCE)
    self.assertAlmostEqual(_fid(1), expected, delta=1e-6 * expected)

  def test_is_the_same_on_eight_devices(self):
    self.assertAlmostEqual(_fid(8), _fid(1), delta=1e-6 * _fid(1))

  @parameterized.parameters((1, 64), (3, 63))
  def test_images_are_decoded_few_at_a_time(self, devices, most):
    sizes = []

    def extract(images, mesh):
      sizes.append(len(images))
      return _extract(images)

    config = tiny.dit_config(
      sample={"fid_images": 70, "steps": "1", **_FILES},
      eval={"batch_size": 192}, mesh={"data": devices},
    )  # fmt: skip
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:devices])
    with sharding.use_mesh(mesh):
      params = jax.device_put(
        tiny.random_params(config), sharding.replicated(mesh)
      )
      make_fid(config, _REFERENCE, extract)(params, mesh)
    self.assertEqual(sizes, [most, most])

  def test_depends_on_the_parameters(self):
    self.assertNotAlmostEqual(_fid(1, seed=1), _fid(1), delta=1e-3 * _fid(1))

  def test_run_writes_it_with_every_evaluation_and_resumed_the_same(self):
    root = pathlib.Path(self.create_tempdir().full_path)

    def run(name, steps):
      config = _config(mesh={"data": 1}, train={"steps": steps})
      config = dataclasses.replace(
        config, eval=dataclasses.replace(config.eval, every=1)
      )
      found = _REFERENCE, _extract
      devices = jax.devices()[:1]
      with mock.patch.object(denoising, "_inception", return_value=found):
        train(config, str(root / name), devices=devices)
      lines = (root / name / "metrics.jsonl").read_text().splitlines()
      rows = [json.loads(line) for line in lines]
      return {r["step"]: r["fid"] for r in rows if "fid" in r}

    whole = run("whole", 3)
    self.assertEqual(list(whole), [1, 2, 3])
    run("parts", 2)
    self.assertEqual(run("parts", 3), whole)

  def test_config_alone_asks_for_it(self):
    workdir = pathlib.Path(self.create_tempdir().full_path, "run")
    config = _config(mesh={"data": 1})
    with self.assertRaisesRegex(FileNotFoundError, "stats.npz"):
      train(config, str(workdir), devices=jax.devices()[:1])
    self.assertFalse(workdir.exists())

  def test_latents_need_their_autoencoder(self):
    config = _config(
      model={"channels": 2}, data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215},
    )  # fmt: skip
    with self.assertRaisesRegex(ValueError, "an autoencoder must decode"):
      make_fid(config, _REFERENCE, _extract)

  @parameterized.parameters(
    ({"fid_images": 1}, "sample.fid_images=1 must be 0, or at least 2"),
    ({"fid_images": 2, "fid_inception": "x"}, "sample.fid_reference='' must"),
    ({"fid_images": 2, "fid_reference": "x"}, "sample.fid_inception='' must"),
    ({"fid_resize": "other"}, "sample.fid_resize='other' must be one of"),
  )
  def test_config_says_what_is_missing(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      SampleConfig(**fields)


if __name__ == "__main__":
  absltest.main()
