import json

import chex

from moh_jax.config import apply_overrides
from moh_jax.config.registry import SPLITS
from moh_jax.data import sources
from moh_jax.data.packed import PackedImages
from moh_jax.data.sources import ImageFolderSource, Selection
from moh_jax.data.tokenizers import load_tokenizer
from moh_jax.data.tokens import TokenSet
from moh_jax.training import denoising
from tests.cli import tiny_checkpoint
from tests.data import tiny_sets
from tests.inference import tiny_vae


class PackImagesTest(tiny_checkpoint.CommandTest):
  COMMAND = "prepare pack-images"

  def setUp(self):
    super().setUp()
    self.images, self.out = self.root / "images", self.root / "out"

  def call(self, *argv):
    return super().call("--data", self.images, "--out", self.out, *argv)

  def _packed(self, split):
    return PackedImages(str(self.out), split, 3)

  def test_packs_every_split_once(self):
    for split in SPLITS:
      tiny_vae.save_images(self.images / split)
    self.images.joinpath("val/cat/4.png").write_text("no image")
    names = self.root / "names.txt"
    names.write_text("cat\nant\n")
    argv = ("--bad-images=skip", "--class-list", names)
    argv += ("--shorter-side=9",)
    skipped = f"; 1 skipped, see {self.out / 'val'}/skipped.txt"
    told = "".join(
      f"{split}: {count} images of 2 classes in {self.out / split}{more}\n"
      for split, count, more in (("train", 10, ""), ("val", 9, skipped))
    )
    for _ in range(2):  # a second call finds all done
      self.assertEqual(self.done(*argv), told)
    self.assertEqual(self._packed("val").class_names, ("cat", "ant"))
    self.assert_refused("shorter_side: 0 here, 9 there", *argv[:-1])

  def test_share_becomes_val_as_in_a_run(self):
    tiny_vae.save_images(self.images, per_class=20)
    self.done("--val-share=0.25")
    for split in SPLITS:
      folder = ImageFolderSource(str(self.images), split, 3, Selection(0.25))
      packed = self._packed(split)
      chex.assert_trees_all_equal([*map(dict, packed)], [*map(dict, folder)])


class EncodeLatentsTest(tiny_checkpoint.CommandTest):
  COMMAND = "prepare encode-latents --image-size=8 --batch-size=8"

  def test_images_to_training_batches(self):
    images, out, again = (self.root / x for x in ("images", "out", "again"))
    packed, argv = self.root / "packed", ("--vae", self.root / "vae")
    tiny_vae.save(self.root / "vae")
    for seed, split in enumerate(SPLITS):
      tiny_vae.save_images(images / split, seed=seed)
    told = "10 images as latents of 4 x 4 x 2\n"
    self.assertEqual(
      self.done(*argv, "--data", images, "--out", out),
      "".join(f"{out / split}: {told}" for split in SPLITS),
    )
    config = apply_overrides(
      tiny_sets.dit_config(path=out), "diffusion", latent_scale=None
    )
    source = sources.make_source(config, "train")
    batch = next(tiny_sets.train_stream(config, source))
    self.assertEqual(batch["image"].shape, (4, 4, 4, 2))
    # A checkpoint knows the encoder, so that another one is warned of.
    made = json.loads((out / "train" / "metadata.json").read_text())
    task = denoising.make_task(config)
    self.assertEqual(task.encoder_sha256, made["encoder_sha256"])
    tiny_checkpoint.done(
      *("prepare", "pack-images", "--data", images, "--out", packed)
    )
    self.done(*argv, "--data", packed, "--out", again)
    written, expected = (
      {x.relative_to(to): x.read_bytes() for x in to.rglob("*.array_record")}
      for to in (again, out)
    )
    self.assertEqual(written, expected)


class TextTest(tiny_checkpoint.CommandTest):
  COMMAND = "prepare"

  def setUp(self):
    super().setUp()
    rows = [{"body": f"head {i} of layer {i * i}"} for i in range(500)]
    lines = "\n".join([*map(json.dumps, rows), *["{"] * 50])
    (self.root / "a.jsonl").write_text(lines)

  def call(self, kind, *argv):
    where = "--field=body", "--data", self.root / "*.jsonl", "--out"
    return super().call(kind, *where, *argv)

  def test_documents_are_held_out_and_broken_lines_skipped_on_request(self):
    out = self.root / "out"
    argv = "tokenize", out, "--tokenizer=bytes", "--held-out=0.2"
    for words in ("a.jsonl:501: not JSON", "(--on-error skip goes on)"):
      self.assert_refused(words, *argv)
    told = self.done(*argv, "--on-error=skip")
    train, val = (TokenSet(out / s).metadata for s in SPLITS)
    self.assertEqual(train["documents"] + val["documents"], 500)
    self.assertBetween(val["documents"], 98, 102)
    self.assertRegex(told, rf"; \d+ skipped, see {out}/\w+/skipped.txt\n")

  def test_writes_a_tokenizer_of_the_size_or_tells(self):
    file = self.root / "tokenizer.json"
    argv = "train-tokenizer", file, "--on-error=skip", "--vocab-size"
    bad = f"{self.root}/a.jsonl:501: not JSON"
    told = f"{file}: 400 entries; 50 skipped, first {bad}"
    self.assertStartsWith(self.done(*argv, 400), told)
    tokenizer = load_tokenizer(file)
    self.assertEqual(tokenizer.vocab_size, 400)
    self.assertLess(len(tokenizer.encode("head 1 of layer 1")), 9)
    file.unlink()
    self.assertIn("--vocab-size=99999 is not reached", self.done(*argv, 99999))
