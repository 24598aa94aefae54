import json
import pathlib

from absl.testing import absltest, parameterized
from etils import epath

from moh_jax.runtime import steps
from tests.cli import tiny_checkpoint
from tests.data import tiny_text


class VerifyCommandTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    for step in (2, 4):
      folder = self.workdir / "checkpoints" / str(step)
      (folder / "params").mkdir(parents=True)
      (folder / "params" / "d").write_bytes(b"values")
      steps.write_manifest(epath.Path(folder))

  def _verify(self, *options):
    status, out, err = tiny_checkpoint.call("verify", self.workdir, *options)
    return status, out.splitlines(), err

  def test_whole_checkpoints(self):
    self.assertEqual(
      self._verify(), (0, ["step 2: whole", "step 4: whole"], "")
    )

  def test_sets_of_shards(self):
    folder = self.workdir / "shards" / "train"
    tiny_text.write(folder, [[[1, 2, 3]]])
    for place in (folder, folder.parent):
      status, out, _ = tiny_checkpoint.call("verify", place)
      self.assertEqual((status, out), (0, f"{folder}: whole\n"))
    file = next(folder.glob("*.array_record"))
    content = bytearray(file.read_bytes())
    content[-30] ^= 1
    file.write_bytes(content)
    status, out, _ = tiny_checkpoint.call("verify", folder.parent)
    self.assertEqual(status, 1)
    self.assertEqual(out, f"{file}: its content is not what was written\n")

  def test_a_set_without_a_kind_does_not_hide_the_others(self):
    for name in ("train", "val"):
      tiny_text.write(self.workdir / "shards" / name, [[[1, 2, 3]]])
    file = self.workdir / "shards/train/metadata.json"
    file.write_text('{"format": "sounds", "version": 1}')
    status, out, _ = tiny_checkpoint.call("verify", self.workdir / "shards")
    self.assertEqual(status, 1)
    first, second = out.splitlines()
    self.assertStartsWith(first, f"{file}: 'format' is 'sounds', must be one")
    self.assertEqual(second, f"{self.workdir / 'shards/val'}: whole")

  def test_damaged_file_is_named_and_the_status_is_1(self):
    file = self.workdir / "checkpoints/4/params/d"
    file.write_bytes(b"Values")
    damaged = (
      "step 4: damaged, item params, file d: its content is not what was "
      "written"
    )
    self.assertEqual(self._verify(), (1, ["step 2: whole", damaged], ""))
    self.assertEqual(self._verify("--step", "4"), (1, [damaged], ""))
    self.assertEqual(self._verify("--step", "2"), (0, ["step 2: whole"], ""))
    status, out, _ = self._verify("--json", "-")
    self.assertEqual(status, 1)
    found = json.loads(out[0])
    self.assertEqual([report["step"] for report in found], [2, 4])
    self.assertEqual(found[0]["damage"], [])
    self.assertEqual(found[1]["damage"][0]["file"], "params/d")

  def test_older_checkpoints_have_no_checksums(self):
    for step in (2, 4):
      (self.workdir / f"checkpoints/{step}" / steps.MANIFEST).unlink()
    status, out, _ = self._verify()
    self.assertEqual(status, 0)
    self.assertIn("step 2: without checksums", out[0])

  @parameterized.parameters(("--step", "3"), ())
  def test_missing_checkpoint_is_one_line(self, *options):
    if not options:
      self.workdir /= "elsewhere"
    status, _, err = self._verify(*options)
    self.assertEqual(status, 2)
    self.assertStartsWith(err, "error: ")
    self.assertLen(err.splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
