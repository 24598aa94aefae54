"""`inspect`: reports on models, checksums of files, pictures of batches."""

import json
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized
from etils import epath
from PIL import Image

from moh_jax.cli.inspect import layer_rows
from moh_jax.data import pipeline
from moh_jax.data.image_shards import LatentSource
from moh_jax.data.sources import make_source
from moh_jax.models.generation import to_pixels
from moh_jax.models.registry import make_model
from moh_jax.models.vae import VAE
from moh_jax.runtime import steps
from moh_jax.runtime.sharding import abstract_params, unbox
from moh_jax.runtime.steps import load_config
from tests.cli import tiny_checkpoint
from tests.data import tiny_text
from tests.inference import tiny_vae

_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
_RUN = "tests/faults/tiny_run.py"


def _call(*argv):
  return tiny_checkpoint.call("inspect", *argv)


def _report(*argv):
  status, out, err = _call(*argv, "--json", "-")
  if status:
    raise AssertionError(err)
  return json.loads(out)


class ModelsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.checkpoint = pathlib.Path(folder, "vit")
    tiny_checkpoint.save(cls.checkpoint)

  def test_describes_a_checkpoint(self):
    report = _report("--checkpoint", self.checkpoint)
    self.assertEqual(report["step"], 0)
    self.assertEqual(report["class_names"], list(tiny_checkpoint.CLASS_NAMES))
    self.assertEqual(report["activated_share"], 0.5)
    self.assertEqual(report["config"]["model"]["top_k"], [1])
    layer = {
      "layer": 0, "stage": 1, "tokens": 4, "num_heads": 4, "head_dim": 2,
      "shared": 1, "routed": 3, "top_k": 1, "active": 2,
      "attention": "dense",
    }  # fmt: skip
    self.assertEqual(report["layers"], [layer])
    params = unbox(abstract_params(*make_model(tiny_checkpoint.CONFIG)))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.assertEqual(report["parameters"], count)
    self.assertEqual(sum(report["parameters_by_module"].values()), count)

  def test_keys_of_a_checkpoint_can_be_changed(self):
    change = "--config.model.top_k=2"
    report = _report("--checkpoint", self.checkpoint, change)
    self.assertEqual(report["activated_share"], 0.75)

  @parameterized.parameters(
    ("llama3_moh.py", 2, 12.0, 1.0),
    ("llama3_moh.py", 8, 4.0, 1.333),
    ("llama3_moh.py", 16, None, None),  # 8 key/value heads
    ("vit.py:b75", 4, 1.0, 1.0),  # its form computes every head
  )
  def test_heads_on_the_devices_of_a_tensor_axis(
    self, name, devices, expected, imbalance
  ):
    report = _report(
      "--config", _CONFIGS / name, f"--config.mesh.tensor={devices}"
    )
    layer = report["layers"][0]
    self.assertEqual(layer["per_device"], expected)
    self.assertEqual(layer["imbalance"], imbalance)

  @parameterized.parameters(
    ("vit_digits.py:moh", 0.75, ["window", "window", "dense", "dense"]),
    ("llm_stdlib.py:moh", 0.75, ["packed"] * 4),
    # Layers whose top_k changes skip no head.
    ("llm_stdlib.py:tune", 0.75, ["packed"] * 4),
    ("llm_stdlib.py:schedule", 0.75, ["blocked"] * 4),
  )
  def test_describes_a_config(self, spec, share, forms):
    report = _report("--config", _CONFIGS / spec)
    self.assertIsNone(report["step"])
    self.assertAlmostEqual(report["activated_share"], share)
    self.assertEqual([row["attention"] for row in report["layers"]], forms)

  def test_a_form_that_is_impossible_here_is_said(self):
    spec = f"{_CONFIGS / 'llm_stdlib.py'}:moh"
    rows = layer_rows(load_config(spec, ["model.attention_impl=cudnn"]))
    forms = {row["attention"] for row in rows}
    self.assertEqual(forms, {"cudnn (impossible on this cpu)"})

  def test_prints_tables(self):
    status, out, _ = _call("--checkpoint", self.checkpoint)
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^layers +count +stage +tokens +num_heads")
    self.assertRegex(out, r"(?m)^classes: 6 \(ant, bee, cat, dog, eel, fox\)$")
    self.assertNotIn("{", out)
    self.assertRegex(out, r"(?m)^activated share: 0\.5000$")
    _, out, _ = _call("--config", f"{_CONFIGS / 'vit_digits.py'}:moh")
    self.assertRegex(out, r"(?m)^0-1 +2 +1 +64 +4 .* window$")
    self.assertRegex(out, r"(?m)^2-3 +2 +2 +16 +8 .* dense$")
    self.assertIn("router: two_stage (released)\n", out)


class ChecksumsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def test_checkpoints(self):
    for step in (2, 4):
      folder = self.workdir / "checkpoints" / str(step)
      (folder / "params").mkdir(parents=True)
      (folder / "params" / "d").write_bytes(b"values")
      steps.write_manifest(epath.Path(folder))
    argv = ("--checksums", "--checkpoint", self.workdir)
    whole = "step 2: whole\n"
    self.assertEqual(_call(*argv), (0, f"{whole}step 4: whole\n", ""))
    (self.workdir / "checkpoints/4/params/d").write_bytes(b"Values")
    damaged = (
      "step 4: damaged, item params, file d: its content is not what was "
      "written\n"
    )
    self.assertEqual(_call(*argv), (1, whole + damaged, ""))
    self.assertEqual(_call(*argv, "--step", "4"), (1, damaged, ""))
    self.assertEqual(_call(*argv, "--step", "2"), (0, whole, ""))
    status, out, _ = _call(*argv, "--json", "-")
    first, second = json.loads(out)
    self.assertEqual((status, first), (1, {"step": 2, "damage": []}))
    self.assertEqual(second["step"], 4)
    self.assertEqual(second["damage"][0]["file"], "params/d")
    status, _, err = _call(*argv, "--step", "3")
    self.assertEqual((status, len(err.splitlines())), (2, 1))
    (self.workdir / "checkpoints/2" / steps.MANIFEST).unlink()
    status, out, _ = _call(*argv, "--step", "2")
    self.assertEqual(status, 0)
    self.assertIn("step 2: without checksums", out)

  def test_sets_of_shards(self):
    for name in ("train", "val"):
      tiny_text.write(self.workdir / name, [[[1, 2, 3]]])
    train, val = self.workdir / "train", self.workdir / "val"
    argv = ("--checksums", "--data")
    whole = f"{val}: whole\n"
    self.assertEqual(_call(*argv, val), (0, whole, ""))
    self.assertEqual(
      _call(*argv, self.workdir), (0, f"{train}: whole\n{whole}", "")
    )
    file = next(train.glob("*.array_record"))
    content = bytearray(file.read_bytes())
    content[-30] ^= 1
    file.write_bytes(content)
    damaged = f"{file}: its content is not what was written\n"
    self.assertEqual(_call(*argv, self.workdir), (1, damaged + whole, ""))
    (train / "metadata.json").write_text('{"format": "sounds", "version": 1}')
    status, out, _ = _call(*argv, self.workdir)
    self.assertEqual(status, 1)
    self.assertIn("holds 'sounds' of version 1, expected", out.splitlines()[0])
    self.assertEndsWith(out, whole)
    status, _, err = _call(*argv, train.parent.parent / "nowhere")
    self.assertEqual(status, 2)
    self.assertIn("nowhere holds no shards", err)


class BatchTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enterContext(tempfile.TemporaryDirectory())
    self._out = pathlib.Path(folder) / "new" / "sheet.png"

  def _draw(self, *argv, run=f"{_RUN}:vit"):
    return _call("--config", run, "--batch", self._out, *argv)

  def _batch(self, step):
    """The run's whole batch of a step, unmixed."""
    config = load_config(f"{_RUN}:vit")
    dataset = pipeline.train_images(config, make_source(config, "train"))
    rows = range(config.data.batch_size)
    stream = pipeline.TrainBatches(dataset, config.data, rows)
    stream.seek(step - 1)
    batch = next(stream)
    stream.close()
    return batch

  @parameterized.parameters(1, 3)
  def test_tiles_are_the_images_of_the_step(self, step):
    status, out, err = self._draw(
      *("--num", 4, "--columns", 4, "--at-step", step),
      *("--config.classifier.mixup=0.", "--config.classifier.cutmix=0."),
    )
    self.assertEqual(status, 0, err)
    batch = self._batch(step)
    size = len(batch["label"])
    names = [str(batch["label"][i]) for i in (0, 1, size - 2, size - 1)]
    self.assertEqual(out, f"row 1: {', '.join(names)}\n")
    sheet, gap = np.asarray(Image.open(self._out)), 2
    for place, row in enumerate((0, 1, size - 2, size - 1)):
      image = batch["image"][row][..., 0]
      zoom = 112 // image.shape[1]
      left = place * (zoom * image.shape[1] + gap)
      tile = sheet[: zoom * image.shape[0], left : left + zoom * len(image)]
      np.testing.assert_array_equal(tile[::zoom, ::zoom], image)

  def test_mixed_images_have_both_names_and_shares(self):
    status, out, err = self._draw(
      *("--config.classifier.mixup=1.0", "--config.classifier.cutmix=0."),
    )
    self.assertEqual(status, 0, err)
    rows = [line.partition(": ")[2] for line in out.splitlines()]
    named = [name for row in rows for name in row.split(", ")]
    labels = self._batch(1)["label"]
    mixed = 0
    for name, label, other in zip(named, labels, labels[::-1], strict=True):
      parts = [part.split(" ") for part in name.split(" + ")]
      self.assertEqual({x[0] for x in parts}, {str(label), str(other)})
      if label != other:
        mixed += 1
        shares = [int(share.removesuffix("%")) for _, share in parts]
        self.assertEqual(sum(shares), 100)
    self.assertGreater(mixed, 0)

  @parameterized.parameters(
    (("--config.data.batch_size=1",), 1),
    (("--config.data.batch_size=5",), 4),
    (("--num", "3"), 3),
  )
  def test_number_is_what_the_batch_has(self, argv, expected):
    status, out, err = self._draw(*argv)
    self.assertEqual(status, 0, err)
    self.assertLen(out.split(", "), expected)

  @parameterized.parameters(f"{_RUN}:llm", "configs/dit.py:s2_90")
  def test_text_and_latents_have_no_pixels(self, run):
    status, _, err = self._draw(run=run)
    self.assertEqual(status, 2)
    self.assertIn("--batch shows pixels, not text or latents", err)


class LatentsTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    tiny_vae.save(cls.root / "vae")
    tiny_vae.save_images(cls.root / "images" / "train")
    status, _, err = tiny_checkpoint.call(
      *("prepare", "encode-latents", "--data", cls.root / "images"),
      *("--vae", cls.root / "vae", "--out", cls.root / "latents"),
      *("--image-size", 8, "--batch-size", 8),
    )
    assert status == 0, err

  def _draw(self, out, *argv, vae="vae", data="latents"):
    return _call(
      *("--data", self.root / data, "--vae", self.root / vae),
      *("--batch", self.root / out, *argv),
    )

  def test_shows_latents_of_all_the_set_and_their_classes(self):
    status, out, err = self._draw("x.png", "--num", 4)
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

  def test_another_encoder_is_said(self):
    tiny_vae.save(self.root / "other", seed=1)
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self._draw("other.png", "--num", 1, vae="other")
    self.assertIn("its encoder is not the one", logs.output[0])


if __name__ == "__main__":
  absltest.main()
