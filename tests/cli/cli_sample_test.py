import json
import pathlib
import tempfile
import zipfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.cli.options import Checkpoint
from moh_jax.convert import vae as autoencoder
from moh_jax.inference.restore import restore
from moh_jax.inference.sample import Sampler
from moh_jax.runtime import checkpoint, sharding
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae
from tests.training import tiny

_KEY = "--config.sample."


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

  def _grid(self, *argv):
    status, out, err = self._call(*argv)
    self.assertEqual(status, 0, err)
    with Image.open(self.root / "x.png") as picture:
      self.assertEqual(picture.mode, "L")
      return out, np.asarray(picture)

  def _npz(self, *argv, out="x.npz"):
    status, _, err = self._call(*argv, out=out)
    self.assertEqual(status, 0, err)
    with np.load(self.root / out) as stored:
      return stored["arr_0"], stored["arr_1"]

  def test_grid_holds_one_image_of_every_class(self):
    out, grid = self._grid()
    self.assertEqual(out, f"10 images written to {self.root / 'x.png'}\n")
    self.assertEqual(grid.shape, (8, 10 * 8 + 9 * 2))
    images, labels = self._npz()
    np.testing.assert_array_equal(labels, np.arange(10))
    for i, image in enumerate(images):
      tile = grid[:, 10 * i : 10 * i + 8]
      np.testing.assert_array_equal(tile, image[..., 0])

  def test_grid_is_of_the_wanted_labels_number_and_columns(self):
    out, grid = self._grid("--labels=3,3,7", "--num=5", "--columns=2")
    self.assertStartsWith(out, "5 images")
    self.assertEqual(grid.shape, (28, 18))
    np.testing.assert_array_equal(grid[20:, 10:], 255)  # no sixth image

  def test_classes_may_be_named(self):
    named = self.root / "named"
    metadata, _ = checkpoint.read_metadata(self.workdir)
    names = ("cat", "big dog", "tench, Tinca tinca", "cup/mug", *"456789")
    checkpoint.save_params(
      named,
      tiny.random_params(metadata.config),
      checkpoint.Metadata(metadata.config, names),
    )
    status, _, err = self._call(
      *("--labels", "big dog,tench,Tinca tinca, none,cat,3,cup/mug"),
      out="x.npz",
      checkpoint=named,
    )
    self.assertEqual(status, 0, err)
    with np.load(self.root / "x.npz") as stored:
      np.testing.assert_array_equal(stored["arr_1"], [1, 2, 10, 0, 3, 3])
    argv = ("--labels", "cup/mug,tench, Tinca tinca", "--num", 2)
    status, _, err = self._call(*argv, out="folder", checkpoint=named)
    self.assertEqual(status, 0, err)
    files = {str(f.relative_to(self.root)) for f in self.root.rglob("*.png")}
    self.assertEqual(
      files,
      {"folder/cup%2Fmug/000000.png", "folder/tench, Tinca tinca/000001.png"},
    )

  def test_npz_has_the_layout_of_the_evaluator(self):
    images, labels = self._npz("--num", 21, "--batch-size", 8)
    self.assertEqual((images.shape, images.dtype), ((21, 8, 8, 1), np.uint8))
    self.assertEqual(labels.dtype, np.int32)
    np.testing.assert_array_equal(labels, np.arange(21) % 10)
    self.assertEqual([p.name for p in self.root.iterdir()], ["x.npz"])

  def test_folder_has_a_file_for_every_image_below_its_label(self):
    images, _ = self._npz("--num", 12, "--labels", "3,none", "--batch-size", 8)
    argv = ("--num", 12, "--labels", "3,none", "--batch-size", 8)
    self.assertEqual(self._call(*argv, out="folder")[0], 0)
    folder = self.root / "folder"
    files = sorted(folder.rglob("*.png"), key=lambda file: file.name)
    self.assertEqual([f.parent.name for f in files], ["3", "none"] * 6)
    read = np.stack([np.asarray(Image.open(file)) for file in files])
    np.testing.assert_array_equal(read, images[..., 0])
    files[9].unlink()
    with mock.patch.object(Sampler, "batch", autospec=True,
                           side_effect=Sampler.batch) as batch:  # fmt: skip
      self.assertEqual(self._call(*argv, out="folder")[0], 0)
    self.assertEqual([call.args[1] for call in batch.call_args_list], [8])
    self.assertTrue(files[9].exists())
    status, _, err = self._call(*argv, "--seed", 1, out="folder")
    self.assertEqual(status, 2)
    self.assertIn("seed: 1 here, 0 there", err)

  def test_start_images_are_kept_the_more_the_less_the_strength(self):
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    (self.root / "starts").mkdir()
    for i, start in enumerate((pixels, 255 - pixels)):
      Image.fromarray(start).save(self.root / "starts" / f"{i}.png")
    argv = (
      "--start",
      self.root / "starts",
      "--labels=3",
      f"{_KEY}steps=50",
    )
    little, labels = self._npz(*argv, "--strength", "0.02")
    np.testing.assert_array_equal(labels, [3, 3])  # one for each image
    much, _ = self._npz(*argv, "--strength", "0.9", out="y.npz")
    starts = np.stack([pixels, 255 - pixels])[..., None].astype(int)
    self.assertLess(np.abs(little - starts).mean(), 20)
    self.assertGreater(np.abs(much - starts).mean(), 40)

  def test_other_start_images_do_not_continue_a_folder(self):
    start = self.root / "start.png"
    argv = ("--start", start, "--strength", "0.5", "--labels", "3")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(start)
    for _ in range(2):  # the same images go on
      status, _, err = self._call(*argv, out="folder")
      self.assertEqual(status, 0, err)
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(start)
    status, _, err = self._call(*argv, out="folder")
    self.assertEqual(status, 2)
    self.assertRegex(err, "start: '1 images, sha256 .* here, '1 images, sha256")

  def test_start_images_of_latents_go_through_the_autoencoder(self):
    config = tiny.dit_config(
      model={"channels": 2}, data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215},
    )  # fmt: skip
    checkpoint.save_params(
      self.root / "dit",
      tiny.random_params(config),
      checkpoint.Metadata(config, tuple("0123456789")),
    )
    tiny_vae.save(self.root / "vae")
    pixels = np.random.RandomState(0).randint(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(self.root / "start.png")
    with mock.patch.object(
      autoencoder, "load_vae", side_effect=autoencoder.load_vae
    ) as load:
      status, _, err = self._call(
        *("--start", self.root / "start.png", "--strength", "0.5"),
        *("--vae", self.root / "vae", "--labels", "3"),
        checkpoint=self.root / "dit",
      )
    self.assertEqual(status, 0, err)
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
    with Image.open(self.root / "x.png") as picture:
      found = np.asarray(picture)
    self.assertLessEqual(np.abs(found - expected).max(), 1)

  @parameterized.parameters(b"", b"no image")
  def test_bad_start_is_refused_before_the_parameters_are_read(self, content):
    (self.root / "a.png").write_bytes(content)
    with mock.patch.object(Checkpoint, "restore") as restored:
      status, _, err = self._call(
        "--start", self.root / "a.png", "--strength", "0.5"
      )
    self.assertEqual(status, 2)
    self.assertIn("a.png", err)
    restored.assert_not_called()

  @parameterized.parameters(
    (("--strength", "0.5"), "--strength=0.5 needs --start"),
    (("--start", "HERE"), "--strength=1.0 must be above 0 and below 1"),
    (("--start", "HERE", "--strength", "nan"), "strength='nan' must be of"),
    (("--start", "", "--strength", "0.5"), "--start[0]='' must be the name"),
    (("--start", "gone.png", "--strength=0.5"), "gone.png: no such file or"),
    (("--start", "EMPTY", "--strength", "0.5"), "empty holds no image"),
  )
  def test_bad_starts_are_one_line(self, argv, message):
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(self.root / "a.png")
    (self.root / "empty").mkdir()
    places = {"HERE": self.root / "a.png", "EMPTY": self.root / "empty"}
    status, _, err = self._call(*(places.get(x, x) for x in argv))
    self.assertEqual(status, 2)
    self.assertIn(message, err)
    self.assertLen(err.splitlines(), 1)
    self.assertFalse((self.root / "x.png").exists())

  def test_same_options_repeat_and_others_differ(self):
    first, _ = self._npz("--num", 8)
    again, _ = self._npz("--num", 8, out="again.npz")
    np.testing.assert_array_equal(again, first)
    for number, argv in enumerate(
      (
        ("--seed", "1"),
        (f"{_KEY}method=dpm", f"{_KEY}steps=3"),
        (f"{_KEY}cfg_scale=4",),
      )
    ):
      other, _ = self._npz("--num", 8, *argv, out=f"{number}.npz")
      self.assertFalse(np.array_equal(other, first), argv)

  def test_finished_file_of_other_settings_is_kept(self):
    before, _ = self._npz("--num", 4)
    for argv in (("--seed", 1), ("--config.diffusion.latent_scale=2",)):
      status, _, err = self._call("--num", 4, *argv, out="x.npz")
      self.assertEqual(status, 2)
      self.assertIn("made with other settings", err)
    after, _ = self._npz("--num", 4)
    np.testing.assert_array_equal(after, before)

  def test_finished_file_is_of_the_same_model_wherever_it_is(self):
    metadata, _ = checkpoint.read_metadata(self.workdir)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
      params = tiny.random_params(metadata.config, seed=seed)
      checkpoint.save_params(self.root / name, params, metadata)
    argv = ("--num", 4, "--labels", "3")
    for name, expected in (("one", 0), ("same", 0), ("other", 2)):
      where = self.root / "here"
      (self.root / name).rename(where)  # each at the same place
      status, _, err = self._call(*argv, out="x.npz", checkpoint=where)
      self.assertEqual(status, expected, err)
      where.rename(self.root / name)
    self.assertIn("made with other settings", err)
    status, _, err = self._call(
      *argv, out="x.npz", checkpoint=self.root / "same"
    )
    self.assertEqual(status, 0, err)

  def test_finished_file_of_a_version_without_start_images_is_known(self):
    before, _ = self._npz("--num", 4)
    file = self.root / "x.npz"
    with zipfile.ZipFile(file, "a") as archive:
      settings = json.loads(archive.comment)
      known = ("batch_size", "cfg_channels", "cfg_interval", "cfg_scale",
               "checkpoint", "dtype", "ema", "eta", "gate_form", "labels",
               "method", "num", "seed", "step", "steps", "top_k", "vae",
               "vae_tile")  # fmt: skip
      earlier = {name: settings[name] for name in known}
      archive.comment = json.dumps(earlier, sort_keys=True).encode()
    after, _ = self._npz("--num", 4)
    np.testing.assert_array_equal(after, before)

  def test_killed_call_continues_only_with_the_same_settings(self):
    whole, _ = self._npz("--num", 16, "--batch-size", 8, out="whole.npz")
    argv = ("--num", 16, "--batch-size", 8)
    draw, drawn = Sampler.batch, []

    def die_at_the_second(sampler, start, size):
      drawn.append(start)
      if drawn == [0, 8]:
        raise KeyboardInterrupt
      return draw(sampler, start, size)

    with mock.patch.object(Sampler, "batch", die_at_the_second):
      with self.assertRaises(KeyboardInterrupt):
        self._call(*argv, out="x.npz")
      status, _, err = self._call(
        *argv, "--seed=1", f"{_KEY}cfg_scale=3", out="x.npz"
      )
      self.assertEqual(status, 2)
      self.assertIn("cfg_scale: 3.0 here, 2.0 there", err)
      self.assertIn("seed: 1 here, 0 there", err)
      images, _ = self._npz(*argv)
    self.assertEqual(drawn, [0, 8, 8])
    np.testing.assert_array_equal(images, whole)

  @parameterized.parameters(
    (("--labels", "3,10"), "label 10 must be in [0, 9], or none"),
    (("--labels", "9" * 12), "label 999999999999 must be in [0, 9], or none"),
    (("--labels=--5",), "'--5' must be a number, none, or one of the mod"),
    (("--seed=-1",), "seed=-1 must be in [0, 2147483647]"),
    (
      (f"{_KEY}cfg_scale=-0.5",),
      "sample.cfg_scale=-0.5 must be at least 0",
    ),
    (
      (f"{_KEY}cfg_interval=9,3",),
      "sample.cfg_interval=(9, 3) must be",
    ),
    (
      (f"{_KEY}cfg_interval=3",),
      "must have 2 values",
    ),
    (
      (f"{_KEY}steps=51",),
      "steps='51' asks for 51 of the 50 timesteps",
    ),
    ((f"{_KEY}steps=ddim49",), "steps='ddim49' must be"),
    (("--num", "0"), "--num=0 must be at least 1"),
    (("--top-k", "1,9"), "top_k=9 must be in"),
    (("--step", "7"), "no checkpoint of step 7; it has [0]"),
    (("--vae", "sd-vae"), "--vae 'sd-vae': the model does not work on latents"),
  )
  def test_bad_value_is_one_line_that_names_it(self, argv, message):
    self._assert_refused(message, *argv)

  @parameterized.parameters(
    ("x.jpg", "must end in .png or .npz"),
    ("nope/x.png", "no directory"),
  )
  def test_bad_target_is_one_line_that_names_it(self, out, message):
    self._assert_refused(message, out=out)
    self._assert_refused(str(self.root / out), out=out)

  @parameterized.parameters("x.png", "x.npz")
  def test_classifier_is_refused(self, out):
    message = "family 'vit'; `sample` needs 'dit'"
    self._assert_refused(message, out=out, checkpoint=self.classifier)

  def _assert_refused(self, message, *argv, **options):
    status, out, err = self._call(*argv, **options)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)
    self.assertEmpty(list(self.root.iterdir()))


if __name__ == "__main__":
  absltest.main()
