import jax
import numpy as np
import pytest
from PIL import Image

from moh_jax.convert import vae as autoencoder
from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler
from moh_jax.runtime.mesh import make_mesh
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae
from tests.training import tiny

_KEY = "--config.sample."


class SampleTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "sample", "dit"

  def call(self, *argv, out="x.png"):
    return super().call("--out", self.root / out, *argv)

  def _images(self, *argv):
    """Images and labels of a file."""
    out = self.root / "x.npz"
    self.done(*argv, "--out", out)
    with np.load(out) as stored:
      return stored["arr_0"], stored["arr_1"]

  def _grid(self):
    with Image.open(self.root / "x.png") as picture:
      return np.asarray(picture)

  def test_grid_is_of_every_class_or_of_the_wanted_labels(self):
    out = self.done()
    self.assertEqual(out, f"10 images written to {self.root / 'x.png'}\n")
    images, labels = self._images()
    np.testing.assert_array_equal(labels, np.arange(10))
    grid = self._grid()
    self.assertEqual(grid.shape[1], 10 * 112 + 9 * 2)
    names = set()
    for i, image in enumerate(images[..., 0]):
      tile = grid[:, i * 114 :][:, :112]
      shown = image.repeat(14, 0).repeat(14, 1)  # 8 pixels are hard to see
      np.testing.assert_array_equal(tile[:112], shown)
      names.add(tile[112:].tobytes())
    self.assertLen(names, 10)
    argv = ("--labels=3,3,7", "--num=12", f"{_KEY}zoom=2")
    told = {"images": 12, "out": str(self.root / "x.png"), "step": 0}
    self.assertEqual(self.report(*argv), told)
    self.assertEqual(self._grid().shape[1], 10 * 16 + 9 * 2)

  def _named(self, *names):
    """Options for labels of a model whose classes have these names."""
    run = self.root / "named"
    tiny_checkpoint.save_random(run, tiny_checkpoint.DIT_CONFIG, names)
    return "--checkpoint", run, "--labels"

  def _folders(self, *argv):
    """Names of the folders of two images."""
    self.done(*argv, "--num=2", "--out", self.root / "folder")
    return {file.parent.name for file in self.root.rglob("*.png")}

  @pytest.mark.integration
  def test_classes_may_be_named(self):
    argv = self._named("cat", "big dog", "tench, Tinca", "cup/mug", *"456789")
    _, labels = self._images(*argv, "big dog, none,cat,3,cup/mug")
    np.testing.assert_array_equal(labels, [1, 10, 0, 3, 3])
    found = self._folders(*argv, "cup/mug,2")
    self.assertEqual(found, {"cup%2Fmug", "tench, Tinca"})

  @pytest.mark.integration
  def test_names_and_numbers_that_may_be_several_classes_are_refused(self):
    argv = self._named("9", "cat", "none", "cat", *"345678")
    for label in ("9", "cat", "none", "3"):
      message = f"--labels: '{label}' may be any of the labels"
      self.assert_refused(message, *argv, f"0,{label}")
    self.assertEqual(self._folders(*argv, "1,03"), {"cat-1", "cat-3"})

  @pytest.mark.integration
  def test_folder_has_a_file_for_every_image_below_its_label(self):
    argv = ("--num", 12, "--labels", "3,none", "--batch-size", 8)
    images, _ = self._images(*argv)
    folder = self.root / "folder"
    argv += "--out", folder
    self.done(*argv)
    files = sorted(folder.rglob("*.png"), key=lambda file: file.name)
    self.assertEqual([f.parent.name for f in files], ["3", "none"] * 6)
    read = np.stack([np.asarray(Image.open(file)) for file in files])
    np.testing.assert_array_equal(read, images[..., 0])
    self.assert_refused("seed: 1 here, 0 there", *argv, "--seed=1")

  @pytest.mark.integration
  def test_a_file_is_of_one_model_and_one_sampler(self):
    before, _ = self._images("--num=4")
    argv = "--num=4", "--out", self.root / "x.npz"
    for argument in (
      *("--seed=1", "--config.diffusion.latent_scale=2", f"{_KEY}method=dpm"),
      "--config.model.router.gate_form=paper",
    ):
      self.assert_refused("x.npz holds samples of other", *argv, argument)
    with jax.default_prng_impl("rbg"):
      self.assert_refused("x.npz holds samples of other", *argv)
    after, _ = self._images("--num=4")
    np.testing.assert_array_equal(after, before)

  @pytest.mark.integration
  def test_latents_go_through_the_autoencoder(self):
    config = tiny.dit_config(
      model={"channels": 2}, data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215},
    )  # fmt: skip
    run, weights = self.root / "dit", self.root / "vae"
    tiny_checkpoint.save_random(run, config)
    tiny_vae.save(weights)
    argv = "--labels=3", "--checkpoint", run
    self.assert_refused("--vae is missing: ", *argv)
    images, _ = self._images(*argv, "--vae", weights)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    vae = autoencoder.load_autoencoder(str(weights), config, mesh)
    sampler = Sampler(restore(run), decode=vae.decode, labels=[3])
    expected = sampler.batch(0, 1).astype(int)
    self.assertLessEqual(np.abs(images - expected).max(), 1)
