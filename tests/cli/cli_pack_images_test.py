import pathlib
import tempfile

from absl.testing import absltest

from moh_jax.data.images.records import ArrayRecordSource
from tests.cli import tiny_checkpoint
from tests.inference import tiny_vae


class PackImagesCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "packed"

  def _call(self, images, *argv):
    return tiny_checkpoint.call(
      "pack-images", "--data", images, "--out", self.out, *argv
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

  def test_other_settings_are_one_line(self):
    tiny_vae.save_images(self.root / "images")
    self._call(self.root / "images")
    status, out, err = self._call(self.root / "images", "--shard-size", 3)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn("shard_size: 3 here, 1024 there", err)

  def test_no_images_is_one_line(self):
    (self.root / "empty").mkdir()
    for name, reason in (("empty", "holds no image"), ("nope", "no such dir")):
      status, _, err = self._call(self.root / name)
      self.assertEqual(status, 2)
      self.assertIn(reason, err.splitlines()[-1])


if __name__ == "__main__":
  absltest.main()
