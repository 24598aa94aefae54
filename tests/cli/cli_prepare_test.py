import json
import pathlib
import tempfile

import numpy as np
import pyarrow as pa
from absl.testing import absltest, parameterized

from moh_jax.data import sources
from moh_jax.data.image_folders import ImageFolderSource, Selection
from moh_jax.data.image_shards import ArrayRecordSource, LatentSource
from moh_jax.data.token_sets import TokenSet
from moh_jax.data.tokenizers import load_tokenizer
from moh_jax.training import denoising
from tests.cli import tiny_checkpoint
from tests.data import tiny_images as tables
from tests.data import tiny_sets
from tests.inference import tiny_vae


class _KindTest(parameterized.TestCase):
  """Calls a kind of the command on files below `root`."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.images, self.out = self.root / "images", self.root / "out"

  def _call(self, *argv):
    return tiny_checkpoint.call("prepare", *argv)

  def _made(self, *argv):
    status, out, err = self._call(*argv)
    self.assertEqual((status, err), (0, ""))
    return out

  def _assert_refused(self, message, *argv):
    status, _, err = self._call(*argv)
    self.assertEqual(status, 2)
    self.assertStartsWith(err.splitlines()[-1], "error: ")
    self.assertIn(message, err.splitlines()[-1])


class PackImagesTest(_KindTest):
  def _call(self, *argv, images=None):
    images = images or self.images
    return super()._call(
      "pack-images", "--data", images, "--out", self.out, *argv
    )

  def _packed(self, split):
    return ArrayRecordSource(str(self.out), split, 3)

  def test_packs_every_split_once(self):
    for split in sources.SPLITS:
      tiny_vae.save_images(self.images / split)
    told = "".join(
      f"{split}: 10 images of 2 classes in {self.out / split}\n"
      for split in sources.SPLITS
    )
    for _ in range(2):  # a second call finds all done
      self.assertEqual(self._made("--shard-size", 3), told)
    for split in sources.SPLITS:
      self.assertLen(self._packed(split), 10)
    self._assert_refused("shard_size: 1024 here, 3 there")

  def test_share_becomes_val_as_in_a_run(self):
    tiny_vae.save_images(self.images, per_class=20)
    share = ("--val-share", 0.25)
    self._made(*share)
    for split in sources.SPLITS:
      folder = ImageFolderSource(str(self.images), split, 3, Selection(0.25))
      packed = self._packed(split)
      self.assertLen(packed, len(folder))
      for i in range(len(folder)):
        self.assertEqual(packed[i]["label"], folder[i]["label"])
        np.testing.assert_array_equal(packed[i]["image"], folder[i]["image"])
    self.images = self.out / "train"
    self._assert_refused("--val-share=0.25 must be 0", *share)

  def _write_table(self, labels, *columns):
    features = {"image": {"_type": "Image"}} | {
      name: {"_type": "ClassLabel", "names": list(tables.CLASSES)}
      for name in columns
    }
    return tables.make_table(labels, 0, features, label=columns[0])

  def test_label_column_of_tables(self):
    table = self._write_table([0, 1], "fine_label", "coarse_label")
    table = table.append_column("coarse_label", pa.array([2, 0]))
    tables.write(self.images / "train-0.parquet", table)
    self._assert_refused("choose with data.label_column or --label-column")
    self._made("--label-column", "coarse_label")
    packed = self._packed("train")
    self.assertEqual([int(packed[i]["label"]) for i in range(2)], [2, 0])


class EncodeLatentsTest(_KindTest):
  def setUp(self):
    super().setUp()
    self.vae = self.root / "vae"
    tiny_vae.save(self.vae)
    for seed, split in enumerate(sources.SPLITS):
      tiny_vae.save_images(self.images / split, seed=seed)

  def _arguments(self, images=None, out=None, size=8):
    argv = ("--data", images or self.images, "--vae", self.vae)
    argv += ("--out", out or self.out, "--image-size", size)
    argv += ("--batch-size", 8, "--shard-size", 4)
    return [str(arg) for arg in argv]

  def _call(self, *argv, **options):
    return super()._call("encode-latents", *self._arguments(**options), *argv)

  def _shards(self, out):
    return {
      str(path.relative_to(out)): path.read_bytes()
      for path in sorted(out.glob("*/*.array_record"))
    }

  def test_images_to_training_batches(self):
    told = "".join(
      f"{self.out / split}: 10 images as latents of 4 x 4 x 2\n"
      for split in sources.SPLITS
    )
    self.assertEqual(self._made("--latent-scale", 0.5), told)
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

  def test_packed_images_and_several_processes_give_the_same(self):
    self._made()
    expected = self._shards(self.out)
    packed, other = self.root / "packed", self.root / "other"
    tiny_checkpoint.call(
      "prepare", "pack-images", "--data", self.images, "--out", packed
    )
    self.assertEqual(self._call(images=packed, out=other)[0], 0)
    self.assertEqual(self._shards(other), expected)
    shared = self.root / "shared"
    for part, told in (("0/2", "others are not yet"), ("1/2", "10 images")):
      status, out, _ = self._call("--process", part, out=shared)
      self.assertEqual(status, 0)
      self.assertIn(told, out)
    self.assertEqual(self._shards(shared), expected)
    for split in sources.SPLITS:
      self.assertLen(LatentSource(str(shared), split), 10)
      self.assertFalse((shared / split / "unfinished").exists())

  def test_other_settings_are_refused_by_name(self):
    self._made("--split", "val")
    # Nothing of the other split is encoded before that is found.
    status, _, err = self._call(size=6)
    self.assertEqual(status, 2)
    self.assertIn("image_size: 6 here, 8 there", err)
    self.assertFalse(list(self.out.glob("train/*.array_record")))
    message = "compute_dtype: 'bfloat16' here, 'float32' there"
    self._assert_refused(message, "--split=val", "--dtype=bfloat16")
    self.vae = self.root / "other_vae"
    tiny_vae.save(self.vae, seed=1)
    self._assert_refused("vae_sha256: ", "--split", "val")

  def test_bad_image_is_one_line_or_skipped(self):
    file = self.images / "val" / "cat" / "2.png"
    file.write_bytes(file.read_bytes()[:60])
    self._assert_refused(f"error: {file}: damaged", "--split", "val")
    message = "; --bad-images skip leaves out what cannot be used"
    self._assert_refused(message, "--split", "val")
    status, out, _ = self._call("--split", "val", "--bad-images", "skip")
    self.assertEqual(status, 0)
    folder = self.out / "val"
    self.assertIn("9 images as latents of 4 x 4 x 2; 1 skipped, see", out)
    self.assertIn("cat/2.png", next((folder / "skipped").iterdir()).read_text())
    metadata = json.loads((folder / "metadata.json").read_text())
    self.assertEqual((metadata["examples"], metadata["skipped"]), (9, 1))


class TokenizeTest(_KindTest):
  def setUp(self):
    super().setUp()
    for name in ("a", "b"):
      lines = [json.dumps({"body": f"{name} {i}"}) for i in range(50)]
      (self.root / f"{name}.jsonl").write_text("\n".join(lines))

  def _call(self, *argv, pattern="*.jsonl"):
    return super()._call(
      *("tokenize", "--data", self.root / pattern, "--out", self.out),
      *("--tokenizer=bytes", "--field=body", "--workers=1", *argv),
    )

  def test_documents_are_held_out(self):
    out = self._made("--held-out", 0.2).splitlines()
    train, val = (TokenSet(self.out / s).metadata for s in sources.SPLITS)
    self.assertEqual(train["documents"] + val["documents"], 100)
    self.assertEqual(
      out[0],
      f"train: {train['documents']} documents, {train['tokens']:,} tokens of "
      f"{train['text_bytes']:,} bytes of text in {self.out}/train",
    )
    self.assertStartsWith(out[1], "val: ")
    self._made("--held-out", 0.2)

  def test_one_split_takes_all(self):
    (self.root / "c.jsonl").write_text('{"body": ""}\n')
    out = self._made("--split=val", "--shard-bytes=200")
    self.assertEqual([p.name for p in self.out.iterdir()], ["val"])
    metadata = TokenSet(self.out / "val").metadata
    self.assertEqual(metadata["documents"], 100)
    self.assertGreater(len(metadata["shards"]), 3)
    self.assertIn(f"; 1 skipped (1 empty), see {self.out}/val/skipped\n", out)

  def test_broken_lines_are_skipped_on_request(self):
    (self.root / "bad.jsonl").write_text('{"body": 1}\n{\n{"body": "b"}\n{\n')
    out = self._made("--split=train", "--on-error=skip")
    self.assertIn("train: 101 documents", out)
    reasons = "3 skipped (2 not JSON, 1 'body' is int, expected text)"
    self.assertIn(f"; {reasons}, see {self.out}/train/skipped\n", out)


class TrainTokenizerTest(_KindTest):
  def setUp(self):
    super().setUp()
    self.out = self.root / "tokenizer.json"
    text = "".join(f"head {i} of layer {i * i}\n" for i in range(500))
    (self.root / "a.txt").write_text(text)

  def _call(self, size, *argv, pattern="*.txt", out=None):
    return super()._call(
      *("train-tokenizer", "--data", self.root / pattern),
      *("--vocab-size", size, "--out", out or self.out, *argv),
    )

  def test_writes_a_tokenizer_of_the_size(self):
    self.assertEqual(self._made(400), f"{self.out}: 400 entries\n")
    tokenizer = load_tokenizer(self.out)
    self.assertEqual(tokenizer.vocab_size, 400)
    self.assertLess(len(tokenizer.encode("head 1 of layer 1")), 9)

  def test_text_that_is_too_short_is_told(self):
    self.assertIn("--vocab-size=99999 is not reached", self._made(99999))

  def test_broken_lines_are_skipped_on_request(self):
    lines = ['{"text": "head of a layer"}', "{"] * 50
    (self.root / "bad.jsonl").write_text("\n".join(lines))
    status, out, err = self._call(265, "--on-error=skip", pattern="bad.jsonl")
    told = f"{self.out}: 265 entries; 50 skipped (50 not JSON)\n"
    self.assertEqual((status, out), (0, told), err)


if __name__ == "__main__":
  absltest.main()
