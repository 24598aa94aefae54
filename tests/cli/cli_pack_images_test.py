import pathlib
import tempfile

import numpy as np
import pyarrow as pa
from absl.testing import absltest

from moh_jax.data.image_folders import ImageFolderSource
from moh_jax.data.image_shards import ArrayRecordSource
from tests.cli import tiny_checkpoint
from tests.data import image_tables_test as tables
from tests.inference import tiny_vae


class PackImagesCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "packed"

  def _call(self, images, *argv):
    return tiny_checkpoint.call(
      "prepare", "pack-images", "--data", images, "--out", self.out, *argv
    )

  def test_packs_every_split(self):
    for split in ("train", "val"):
      tiny_vae.save_images(self.root / "images" / split)
    status, out, _ = self._call(self.root / "images", "--shard-size", 3)
    self.assertEqual(status, 0)
    self.assertEqual(
      out.splitlines(),
      [
        f"{split}: 10 images of 2 classes in {self.out / split}"
        for split in ("train", "val")
      ],
    )
    for split in ("train", "val"):
      self.assertLen(ArrayRecordSource(str(self.out), split, 3), 10)
    self.assertEqual(self._call(self.root / "images", "--shard-size", 3)[0], 0)

  def test_folder_of_classes_is_the_named_split(self):
    tiny_vae.save_images(self.root / "images")
    status, *_ = self._call(self.root / "images", "--split", "val")
    self.assertEqual(status, 0)
    self.assertEqual([p.name for p in self.out.iterdir()], ["val"])

  def test_share_becomes_val(self):
    tiny_vae.save_images(self.root / "images", per_class=20)
    share = ("--val-share", 0.25)
    status, _, err = self._call(self.root / "images", *share)
    self.assertEqual(status, 0, err)
    for split in ("train", "val"):
      # The same images as a run on the folder trains on and holds out.
      folder = ImageFolderSource(
        str(self.root / "images"), split, 3, val_share=0.25
      )
      packed = ArrayRecordSource(str(self.out), split, 3)
      self.assertLen(packed, len(folder))
      for i in range(len(folder)):
        self.assertEqual(packed[i]["label"], folder[i]["label"])
        np.testing.assert_array_equal(packed[i]["image"], folder[i]["image"])
    status, _, err = self._call(self.out / "train", *share)
    self.assertEqual(status, 2)
    self.assertIn("--val-share=0.25 must be 0", err)

  def test_share_of_tables_becomes_val(self):
    images = self.root / "images"
    features = {
      "image": {"_type": "Image"},
      "label": {
        "_type": "ClassLabel",
        "names": list(tables.CLASSES),
      },
    }
    table = tables.make_table([0, 1, 2] * 15, 0, features)
    tables.write(images / "train-0.parquet", table)
    status, _, err = self._call(images, "--val-share", 0.25)
    self.assertEqual(status, 0, err)
    sizes = [
      len(ArrayRecordSource(str(self.out), split, 3))
      for split in ("train", "val")
    ]
    self.assertEqual(sum(sizes), 45)
    self.assertGreater(min(sizes), 0)

  def test_other_settings_are_one_line(self):
    tiny_vae.save_images(self.root / "images")
    self._call(self.root / "images")
    status, out, err = self._call(self.root / "images", "--shard-size", 3)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn("shard_size: 3 here, 1024 there", err)

  def test_label_column_of_tables(self):
    images = self.root / "images"
    features = {"image": {"_type": "Image"}} | {
      name: {"_type": "ClassLabel", "names": list(tables.CLASSES)}
      for name in ("fine_label", "coarse_label")
    }
    table = tables.make_table([0, 1], 0, features, label="fine_label")
    table = table.append_column("coarse_label", pa.array([2, 0]))
    tables.write(images / "train-0.parquet", table)
    status, _, err = self._call(images)
    self.assertEqual(status, 2)
    self.assertIn("choose with data.label_column or --label-column", err)
    status, _, err = self._call(images, "--label-column", "coarse_label")
    self.assertEqual(status, 0, err)
    packed = ArrayRecordSource(str(self.out), "train", 3)
    self.assertEqual([int(packed[i]["label"]) for i in range(2)], [2, 0])

  def test_label_column_of_folders_is_refused(self):
    tiny_vae.save_images(self.root / "images")
    status, _, err = self._call(self.root / "images", "--label-column", "x")
    self.assertEqual(status, 2)
    self.assertIn("--label-column='x' must be '': ", err)

  def test_sizes_are_checked_before_anything_is_written(self):
    tiny_vae.save_images(self.root / "images")
    for option, least in (("--shorter-side", 0), ("--shard-size", 1)):
      status, _, err = self._call(self.root / "images", option, "-5")
      self.assertEqual(status, 2)
      self.assertIn(f"{option}=-5 must be at least {least}", err)
    self.assertFalse(self.out.exists())

  def test_no_images_is_one_line(self):
    (self.root / "empty").mkdir()
    for name, reason in (("empty", "holds no image"), ("nope", "no such dir")):
      status, _, err = self._call(self.root / name)
      self.assertEqual(status, 2)
      self.assertIn(reason, err.splitlines()[-1])


if __name__ == "__main__":
  absltest.main()
