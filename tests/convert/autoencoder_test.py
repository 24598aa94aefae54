"""The decoder of latents: scaling, and other autoencoders than trained with."""

import pathlib

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DiffusionConfig
from moh_jax.convert.vae import load_autoencoder
from moh_jax.models.vae import VAE, encoder_sha256
from moh_jax.runtime import sharding
from tests.inference import tiny_vae
from tests.training import tiny


class DecoderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path, "vae")
    tiny_vae.save(self.folder)
    self.config = tiny.dit_config(
      model={"channels": 2},
      data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215},
    )

  def _load(self, config=None, encoder=""):
    config = config or self.config
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    return load_autoencoder(str(self.folder), config, mesh, encoder=encoder)

  def test_the_same_encoder_is_silent(self):
    params = tiny_vae.params()
    with self.assertNoLogs("moh_jax", "WARNING"):
      vae = self._load(encoder=encoder_sha256(tiny_vae.CONFIG, params))
    latents = np.zeros((1, 4, 4, 2), np.float32)
    self.assertEqual(vae.decoder()(latents).shape, (1, 8, 8, 3))

  def test_another_encoder_is_said(self):
    other = encoder_sha256(tiny_vae.CONFIG, tiny_vae.params(1))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self._load(encoder=other)
    self.assertIn("its encoder is not the one", logs.output[0])

  def test_another_scaling_is_said(self):
    scaled = DiffusionConfig(latent_scale=0.5, latent_shift=1.0)
    config = tiny.dit_config(
      model={"channels": 2}, data={"source": "fake"},
      diffusion={"latent_scale": 0.5, "latent_shift": 1.0, "space": "latent"},
    )  # fmt: skip
    self.assertEqual(config.diffusion.scaling, scaled.scaling)
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self._load(config)
    self.assertIn("scale 0.18215, not 0.5; shift 0.0, not 1.0", logs.output[0])

  def test_encoder_gives_the_scaled_means_of_the_latents(self):
    images = np.random.default_rng(0).uniform(-1, 1, (2, 16, 16, 3))
    images = images.astype(np.float32)
    mean, _ = VAE(tiny_vae.CONFIG).apply(
      {"params": tiny_vae.params()}, images, method="encode"
    )
    np.testing.assert_allclose(
      self._load().encoder()(images), mean * 0.18215, rtol=1e-4, atol=1e-5
    )

  def test_weights_go_to_the_devices_once(self):
    vae = self._load()
    target = jax.tree.leaves(vae.params)[0].sharding
    latents, images = (
      jax.device_put(np.zeros(shape, np.float32), target)
      for shape in ((1, 4, 4, 2), (1, 8, 8, 3))
    )
    for run, x in ((vae.decoder(), latents), (vae.encoder(), images)):
      first = run(x)
      with jax.transfer_guard_host_to_device("disallow"):
        again = run(x)
      np.testing.assert_array_equal(first, again)

  def test_autoencoder_of_other_channels_is_refused(self):
    config = tiny.dit_config(
      data={"source": "fake"}, model={"channels": 3},
      diffusion={"space": "latent", "latent_scale": 1.0},
    )  # fmt: skip
    with self.assertRaisesRegex(ValueError, "2 latent channels must be"):
      self._load(config)


if __name__ == "__main__":
  absltest.main()
