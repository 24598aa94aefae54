"""A picture of stored latents."""

import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest
from PIL import Image

from moh_jax.cli import show_latents
from moh_jax.convert.vae import Autoencoder
from moh_jax.data.latents import LatentSource
from moh_jax.models.generation import to_pixels
from moh_jax.models.vae import VAE
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae


class ShowLatentsCommandTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    tiny_vae.save(cls.root / "vae")
    tiny_vae.save_images(cls.root / "images" / "train")
    status, _, err = tiny_checkpoint.call(
      *("encode-latents", "--data", cls.root / "images"),
      *("--vae", cls.root / "vae", "--out", cls.root / "latents"),
      *("--image-size", 8, "--batch-size", 8),
    )
    assert status == 0, err

  def _call(self, out, *argv, vae="vae", data="latents"):
    return tiny_checkpoint.call(
      *("show-latents", "--data", self.root / data),
      *("--vae", self.root / vae, "--out", self.root / out, *argv),
    )

  def test_shows_latents_of_all_the_set_and_their_classes(self):
    status, out, err = self._call("x.png", "--num", 4)
    self.assertEqual(status, 0, err)
    self.assertEqual(out, "row 1: ant, ant\nrow 2: cat, cat\n")
    source = LatentSource(str(self.root / "latents"), "train")
    means = np.stack([source[i]["image"][0, 0] for i in (0, 2, 5, 7)])
    images = jax.jit(
      lambda x: VAE(tiny_vae.CONFIG).apply(
        {"params": tiny_vae.params()}, x, method="decode"
      )
    )(means.astype(np.float32))
    expected = np.asarray(to_pixels(images))
    with Image.open(self.root / "x.png") as picture:
      grid = np.asarray(picture)
    self.assertEqual(grid.shape, (18, 18, 3))
    for tile, (row, column) in zip(expected, np.ndindex(2, 2)):
      found = grid[10 * row :, 10 * column :][:8, :8]
      self.assertLessEqual(np.abs(found.astype(int) - tile).max(), 1)

  def test_split_needs_no_other_one(self):
    (self.root / "alone").mkdir()
    shutil.copytree(
      self.root / "latents" / "train", self.root / "alone" / "val"
    )
    status, out, err = self._call(
      "alone.png", "--num", 1, "--split", "val", data="alone"
    )
    self.assertEqual(status, 0, err)
    self.assertEqual(out, "row 1: ant\n")

  def test_latents_are_decoded_in_batches(self):
    seen = []

    def decode(autoencoder, tile=0):
      del autoencoder, tile

      def images(latents):
        seen.append(len(latents))
        return np.zeros((len(latents), 8, 8, 3), np.float32)

      return images

    with (
      mock.patch.object(show_latents, "_BATCH", 4),
      mock.patch.object(Autoencoder, "decoder", decode),
    ):
      status, _, err = self._call("all.png", "--num", 10)
    self.assertEqual(status, 0, err)
    self.assertEqual(seen, [4, 4, 2])

  def test_another_encoder_is_said(self):
    tiny_vae.save(self.root / "other", seed=1)
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self._call("other.png", "--num", 1, vae="other")
    self.assertIn("its encoder is not the one", logs.output[0])

  def test_bad_input_is_one_line_and_writes_nothing(self):
    for options, message in (
      ({"vae": "gone"}, "gone"),
      ({"data": "images"}, "metadata.json"),
    ):
      status, _, err = self._call("bad.png", **options)
      self.assertEqual(status, 2)
      self.assertLen(err.splitlines(), 1)
      self.assertIn(message, err)
    self.assertFalse((self.root / "bad.png").exists())


if __name__ == "__main__":
  absltest.main()
