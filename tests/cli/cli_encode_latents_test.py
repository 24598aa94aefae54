import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import absltest

from moh_jax.data import sources
from moh_jax.data.latents import LatentSource
from moh_jax.training import denoising
from tests.cli import tiny_checkpoint
from tests.data import tiny_sets
from tests.inference import tiny_vae

_SIZES = ("--image-size", 8, "--batch-size", 8, "--shard-size", 4)


class EncodeLatentsCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.vae, self.out = self.root / "vae", self.root / "latents"
    self.images = self.root / "images"
    tiny_vae.save(self.vae)
    for seed, split in enumerate(sources.SPLITS):
      tiny_vae.save_images(self.images / split, seed=seed)

  def _arguments(self, images=None, out=None, sizes=_SIZES):
    images, out = images or self.images, out or self.out
    argv = ("--data", images, "--vae", self.vae, "--out", out, *sizes)
    return [str(arg) for arg in argv]

  def _call(self, *argv, **options):
    return tiny_checkpoint.call(
      "prepare", "encode-latents", *self._arguments(**options), *argv
    )

  def _shards(self, out):
    return {
      str(path.relative_to(out)): path.read_bytes()
      for path in sorted(out.glob("*/*.array_record"))
    }

  def test_images_to_training_batches(self):
    status, out, err = self._call("--latent-scale", 0.5)
    self.assertEqual(status, 0, err)
    self.assertEqual(
      out.splitlines(),
      [
        f"{self.out / split}: 10 images as latents of 4 x 4 x 2"
        for split in sources.SPLITS
      ],
    )
    self.assertEqual(err, "")  # a bar is for terminals
    config = tiny_sets.dit_config(path=self.out)
    source = sources.make_source(config, "train")
    batch = next(tiny_sets.train_stream(config, source))
    self.assertEqual(batch["image"].shape, (4, 4, 4, 2))
    self.assertTrue(np.isfinite(batch["image"]).all())
    # A checkpoint knows the encoder, so that another one is warned of.
    made = json.loads((self.out / "train" / "metadata.json").read_text())
    task = denoising.make_task(config)
    self.assertEqual(task.encoder_sha256, made["encoder_sha256"])
    self.assertLen(task.encoder_sha256, 64)
    source = sources.make_source(config, "val")
    self.assertLen(list(tiny_sets.eval_stream(config, source)), 3)

  def test_packed_images_give_the_same_latents(self):
    packed = self.root / "packed"
    tiny_checkpoint.call(
      "prepare", "pack-images", "--data", self.images, "--out", packed
    )
    self.assertEqual(self._call()[0], 0)
    other = self.root / "other"
    self.assertEqual(self._call(images=packed, out=other)[0], 0)
    self.assertEqual(self._shards(other), self._shards(self.out))

  def test_bfloat16_is_close(self):
    self.assertEqual(self._call("--split", "val")[0], 0)
    other = self.root / "other"
    status, *_ = self._call("--split", "val", "--dtype", "bfloat16", out=other)
    self.assertEqual(status, 0)
    ours, theirs = (
      np.stack([latents[i]["image"] for i in range(10)]).astype(np.float32)
      for latents in (
        LatentSource(str(folder), "val") for folder in (self.out, other)
      )
    )
    self.assertLess(np.abs(ours - theirs).mean(), 0.05 * np.abs(ours).mean())
    self.assertFalse(np.array_equal(ours, theirs))

  def test_other_settings_are_refused_by_name(self):
    self.assertEqual(self._call("--split", "val")[0], 0)
    # Nothing of the other split is encoded before that is found.
    sizes = ("--image-size", 6, *_SIZES[2:])
    status, _, err = self._call(sizes=sizes)
    self.assertEqual(status, 2)
    self.assertIn("image_size: 6 here, 8 there", err)
    self.assertFalse(list(self.out.glob("train/*.array_record")))
    self.vae = self.root / "other_vae"
    tiny_vae.save(self.vae, seed=1)
    status, _, err = self._call("--split", "val")
    self.assertEqual(status, 2)
    self.assertIn("vae_sha256: ", err)

  def test_bad_image_is_one_line_or_skipped(self):
    file = self.images / "val" / "cat" / "2.png"
    file.write_bytes(file.read_bytes()[:60])
    status, _, err = self._call("--split", "val")
    self.assertEqual(status, 2)
    self.assertStartsWith(err.splitlines()[-1], f"error: {file}: damaged")
    self.assertIn("; --bad-images skip leaves out what cannot be used", err)
    status, out, _ = self._call("--split", "val", "--bad-images", "skip")
    self.assertEqual(status, 0)
    folder = self.out / "val"
    self.assertIn("9 images as latents of 4 x 4 x 2; 1 skipped, see", out)
    self.assertIn("cat/2.png", next((folder / "skipped").iterdir()).read_text())
    metadata = json.loads((folder / "metadata.json").read_text())
    self.assertEqual((metadata["examples"], metadata["skipped"]), (9, 1))

  def test_missing_weights_say_what_is_expected(self):
    self.vae = self.root / "nope"
    status, _, err = self._call()
    self.assertEqual(status, 2)
    self.assertLen(err.splitlines(), 1)
    self.assertIn("--vae PATH", err)

  def test_two_processes_share_the_shards(self):
    self.assertEqual(self._call()[0], 0)
    other = self.root / "other"
    command = [sys.executable, "-m", "moh_jax", "prepare", "encode-latents"]
    command += self._arguments(out=other)
    children = [
      subprocess.Popen(
        [*command, "--process", f"{index}/2"], stdout=subprocess.DEVNULL
      )
      for index in range(2)
    ]
    self.assertEqual([child.wait(timeout=300) for child in children], [0, 0])
    self.assertEqual(self._shards(other), self._shards(self.out))
    for split in sources.SPLITS:
      self.assertLen(LatentSource(str(other), split), 10)
      self.assertFalse((other / split / "unfinished").exists())

  def test_one_of_two_processes_leaves_the_set_unfinished(self):
    for part, reason in (("0/2", "others are not yet"), ("1/2", "10 images")):
      status, out, _ = self._call("--split", "val", "--process", part)
      self.assertEqual(status, 0)
      self.assertIn(reason, out)

  def test_process_must_be_a_part(self):
    for part in ("2/2", "-1/2", "1", "a/b", "0/0"):
      status, _, err = self._call(f"--process={part}")
      self.assertEqual(status, 2)
      self.assertIn(f"{part!r} must be I/N", err)


if __name__ == "__main__":
  absltest.main()
