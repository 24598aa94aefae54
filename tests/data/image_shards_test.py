import itertools

import numpy as np
from absl.testing import absltest
from PIL import Image

from moh_jax.data import image_folders, image_shards, sources
from moh_jax.data.decode import describe_image
from tests.data import tiny_sets
from tests.data.folder import FolderTest


class _PackedTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.images, self.out = self.root / "images", self.root / "packed"
    rng = np.random.RandomState(0)
    for split, name, i in itertools.product(
      sources.SPLITS, tiny_sets.CLASSES, range(3)
    ):
      path = self.images / split / name / f"{i}.png"
      path.parent.mkdir(parents=True, exist_ok=True)
      pixels = rng.randint(0, 256, (9 + i, 20 - i, 3), np.uint8)
      Image.fromarray(pixels).save(path)

  def _pack(self, splits=sources.SPLITS):
    for split in splits:
      self._pack_folder(self.images / split, split)

  def _pack_folder(self, folder, split, **options):
    source = image_folders.ImageFolderSource(str(folder), "", 3)
    return image_shards.pack_images(
      source,
      self.out / split,
      packed_from=folder,
      shard_size=4,
      **options,
    )


class PackTest(_PackedTest):
  def test_larger_images_become_smaller(self):
    Image.new("L", (40, 30)).save(self.images / "val/ant/0.png")
    Image.new("RGBA", (20, 44)).save(self.images / "val/ant/1.png")
    self._pack_folder(self.images / "val", "val", shorter_side=10)
    packed = image_shards.ArrayRecordSource(str(self.out), "val", 3)
    described = [describe_image(packed.read(i).content, "") for i in range(3)]
    self.assertEqual(
      described, [((10, 13), True), ((22, 10), False), ((10, 16), False)]
    )
    self.assertTrue(packed.read(0).content.startswith(b"\xff\xd8"))
    file = self.images / "val" / "cat" / "0.png"  # 9 rows: unchanged
    self.assertEqual(packed.read(3).content, file.read_bytes())
    with self.assertRaisesRegex(ValueError, "images: '6 files.* there"):
      self._pack_folder(self.images / "val", "val", shorter_side=9)

  def test_bad_images_end_or_are_left_out(self):
    (self.images / "val/ant/1.png").write_text("no image")
    (self.images / "val/cat/0.png").unlink()
    (self.images / "val/cat/0.png").symlink_to(self.root / "gone.png")
    with self.assertRaisesRegex(ValueError, "ant/1.png: not an image"):
      self._pack_folder(self.images / "val", "val", shorter_side=4)
    metadata = self._pack_folder(
      self.images / "val", "val", shorter_side=4, bad_images="skip"
    )
    self.assertEqual((metadata["examples"], metadata["skipped"]), (4, 2))
    listed = "".join(
      path.read_text() for path in sorted(self.out.glob("val/skipped/*"))
    )
    self.assertIn("ant/1.png: unreadable: ", listed)
    self.assertIn("0.png: a broken link", listed)


class SourceTest(_PackedTest):
  def test_bad_image_does_not_move_the_stream(self):
    self._pack()
    (self.images / "train" / "cat" / "0.png").write_text("no image")
    self.out = self.root / "damaged"
    self._pack()

    def read(path, position, count):
      config = tiny_sets.dit_config(
        "pixel", "array_record", path, (8, 8), 3, bad_images="skip"
      )
      source = sources.make_source(config, "train")
      stream = tiny_sets.train_stream(config, source)
      stream.seek(position)
      batches = list(itertools.islice(stream, count))
      self.assertEqual(stream.position, position + count)
      return np.concatenate([batch["image"] for batch in batches])

    good = read(self.root / "packed", 0, 6)
    skipped = read(self.out, 0, 6)
    differing = (good != skipped).any((1, 2, 3))
    self.assertEqual(differing.sum(), 4)  # once per epoch of 6 in 24
    np.testing.assert_array_equal(read(self.out, 2, 4), skipped[8:])


if __name__ == "__main__":
  absltest.main()
