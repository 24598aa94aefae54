import json
import pathlib
import tempfile
import zipfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.convert import vae as autoencoder
from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler
from moh_jax.runtime import checkpoint, sharding
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae
from tests.training import tiny

_KEY = "--config.sample."
# Settings that files of versions without start images have.
_SETTINGS = (
  *("batch_size", "cfg_channels", "cfg_interval", "cfg_scale", "checkpoint"),
  *("dtype", "ema", "eta", "gate_form", "labels", "method", "num", "seed"),
  *("step", "steps", "top_k", "vae", "vae_tile"),
)


class SampleCommandTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.workdir, cls.classifier = root / "dit", root / "vit"
    tiny_checkpoint.save_dit(cls.workdir)
    tiny_checkpoint.save(cls.classifier)

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _call(self, *argv, out="x.png", checkpoint=None):
    checkpoint = checkpoint or self.workdir
    options = ("--checkpoint", checkpoint, "--out", self.root / out)
    return tiny_checkpoint.call("sample", *options, *argv)

  def _made(self, *argv, **where):
    status, out, err = self._call(*argv, **where)
    self.assertEqual(status, 0, err)
    return out

  def _grid(self, *argv, **where):
    out = self._made(*argv, **where)
    with Image.open(self.root / "x.png") as picture:
      return out, np.asarray(picture)

  def _npz(self, *argv, out="x.npz", **where):
    self._made(*argv, out=out, **where)
    with np.load(self.root / out) as stored:
      return stored["arr_0"], stored["arr_1"]

  def _save(self, name, config, names=tuple("0123456789"), seed=0):
    params = tiny.random_params(config, seed=seed)
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(self.root / name, params, metadata)
    return {"checkpoint": self.root / name}

  def _assert_refused(self, message, *argv, **where):
    status, out, err = self._call(*argv, **where)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)

  def test_grid_holds_one_image_of_every_class(self):
    out, grid = self._grid()
    self.assertEqual(out, f"10 images written to {self.root / 'x.png'}\n")
    self.assertEqual(grid.shape, (8, 10 * 8 + 9 * 2))
    images, labels = self._npz()
    np.testing.assert_array_equal(labels, np.arange(10))
    for i, image in enumerate(images):
      tile = grid[:, 10 * i : 10 * i + 8]
      np.testing.assert_array_equal(tile, image[..., 0])

  def test_grid_is_of_the_wanted_labels_number_columns_and_zoom(self):
    argv = ("--labels=3,3,7", "--num=5", "--columns=2", f"{_KEY}zoom=2")
    out, grid = self._grid(*argv, "--json=-")
    told = {"images": 5, "out": str(self.root / "x.png"), "step": 0}
    self.assertEqual(json.loads(out), told)
    self.assertEqual(grid.shape, (3 * 16 + 2 * 2, 2 * 16 + 2))
    np.testing.assert_array_equal(grid[36:, 18:], 255)  # no sixth image

  def test_classes_may_be_named(self):
    names = ("cat", "big dog", "tench, Tinca tinca", "cup/mug", *"456789")
    named = self._save("named", tiny_checkpoint.DIT_CONFIG, names)
    _, labels = self._npz("--labels", "big dog, none,cat,3,cup/mug", **named)
    np.testing.assert_array_equal(labels, [1, 10, 0, 3, 3])
    self._made("--labels", "cup/mug,2", "--num", 2, out="folder", **named)
    files = {str(f.relative_to(self.root)) for f in self.root.rglob("*.png")}
    self.assertEqual(
      files,
      {"folder/cup%2Fmug/000000.png", "folder/tench, Tinca tinca/000001.png"},
    )

  def test_folder_has_a_file_for_every_image_below_its_label(self):
    argv = ("--num", 12, "--labels", "3,none", "--batch-size", 8)
    images, _ = self._npz(*argv)
    self._made(*argv, out="folder")
    folder = self.root / "folder"
    files = sorted(folder.rglob("*.png"), key=lambda file: file.name)
    self.assertEqual([f.parent.name for f in files], ["3", "none"] * 6)
    read = np.stack([np.asarray(Image.open(file)) for file in files])
    np.testing.assert_array_equal(read, images[..., 0])
    files[9].unlink()
    with mock.patch.object(Sampler, "batch", autospec=True,
                           side_effect=Sampler.batch) as batch:  # fmt: skip
      self._made(*argv, out="folder")
    self.assertEqual([call.args[1] for call in batch.call_args_list], [8])
    self.assertTrue(files[9].exists())
    argv += ("--seed=1", f"{_KEY}cfg_scale=3")
    for message in ("seed: 1 here, 0 there", "cfg_scale: 3.0 here, 2.0 there"):
      self._assert_refused(message, *argv, out="folder")

  def test_same_options_repeat_and_others_differ(self):
    first, _ = self._npz("--num", 8)
    again, _ = self._npz("--num", 8, out="again.npz")
    np.testing.assert_array_equal(again, first)
    others = ("--seed=1", f"{_KEY}method=dpm", f"{_KEY}cfg_scale=4")
    for number, argument in enumerate(others):
      other, _ = self._npz("--num", 8, argument, out=f"{number}.npz")
      self.assertFalse(np.array_equal(other, first), argument)

  def test_finished_file_is_known_by_its_settings_as_of_any_version(self):
    before, _ = self._npz("--num", 4)
    with zipfile.ZipFile(self.root / "x.npz", "a") as archive:
      settings = json.loads(archive.comment)
      earlier = {name: settings[name] for name in _SETTINGS}
      archive.comment = json.dumps(earlier, sort_keys=True).encode()
    for argument in (
      *("--seed=1", "--config.diffusion.latent_scale=2"),
      *("--config.eval.use_ema=false", "--config.model.router.gate_form=paper"),
    ):
      message = "made with other settings"
      self._assert_refused(message, "--num", 4, argument, out="x.npz")
    after, _ = self._npz("--num", 4)
    np.testing.assert_array_equal(after, before)

  def test_start_images_are_what_the_images_begin_with(self):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    starts, argv = self.root / "starts", ("--labels=3", f"{_KEY}steps=50")
    starts.mkdir()
    for i, start in enumerate((pixels, 255 - pixels)):
      Image.fromarray(start).save(starts / f"{i}.png")
    argv = ("--start", starts, *argv, "--strength=0.02")
    for _ in range(2):  # the same images go on
      images, labels = self._npz(*argv)
    np.testing.assert_array_equal(labels, [3, 3])  # one for each image
    given = np.stack([pixels, 255 - pixels])[..., None].astype(int)
    self.assertLess(np.abs(images - given).mean(), 20)
    self._made(*argv, out="folder")
    Image.fromarray(pixels).save(starts / "1.png")
    status, _, err = self._call(*argv, out="folder")
    self.assertEqual(status, 2)
    self.assertRegex(err, "start: '2 images, sha256 .* here, '2 images, sha256")

  def test_start_images_of_latents_go_through_the_autoencoder(self):
    config = tiny.dit_config(
      model={"channels": 2}, data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215},
    )  # fmt: skip
    latent = self._save("dit", config)
    tiny_vae.save(self.root / "vae")
    pixels = np.random.RandomState(0).randint(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(self.root / "start.png")
    argv = ("--start", self.root / "start.png", "--strength=0.5", "--labels=3")
    self._assert_refused("--vae is missing: ", *argv, **latent)
    with mock.patch.object(
      autoencoder, "load_vae", side_effect=autoencoder.load_vae
    ) as load:
      _, found = self._grid(*argv, "--vae", self.root / "vae", **latent)
    self.assertEqual(load.call_count, 1)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    vae = autoencoder.load_autoencoder(str(self.root / "vae"), config, mesh)
    sampler = Sampler(
      restore(self.root / "dit"),
      labels=[3],
      decode=vae.decoder(),
      start=vae.encoder()(pixels[None] / np.float32(127.5) - 1),
      strength=0.5,
    )
    expected = sampler.batch(0, 1)[0].astype(int)
    self.assertLessEqual(np.abs(found - expected).max(), 1)


if __name__ == "__main__":
  absltest.main()
