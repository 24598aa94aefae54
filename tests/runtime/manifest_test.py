"""Checksums of checkpoints: what they find, name and leave alone."""

import os
import pathlib
import random

from absl.testing import parameterized
from etils import epath

from moh_jax.runtime import steps
from tests import folders

_FILES = {
  "config/metadata": b"{}",
  "params/d/0": bytes(range(256)) * 9000,  # more than one chunk of reading
  "params/_METADATA": b"{}",
  "train/d/0": b"state",
  "_CHECKPOINT_METADATA": b"{}",
}


def _write(folder: pathlib.Path) -> None:
  for name, content in _FILES.items():
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
  steps.write_manifest(epath.Path(folder))


class ManifestTest(folders.FolderTest):
  def setUp(self):
    super().setUp()
    self.folder = self.root / "checkpoints/2"
    _write(self.folder)

  def _found(self, items=None):
    return [*steps.find_damage(self.root, 2, items)]

  @parameterized.parameters(*_FILES, steps.MANIFEST)
  def test_every_flipped_bit_and_other_length_names_its_file(self, name):
    self.assertEqual(self._found(), [])
    file = self.folder / name
    content = file.read_bytes()
    damages = [b"", content[: len(content) // 2], content + b"x"]
    for bit in random.Random(name).sample(range(8 * len(content)), 16):
      changed = bytearray(content)
      changed[bit // 8] ^= 1 << bit % 8
      damages.append(bytes(changed))
    for damaged in damages:
      file.write_bytes(damaged)
      self.assertEqual(self._found(), [name], damaged[:100])
    file.unlink()
    self.assertEqual(self._found(), [name])

  def test_only_what_is_read_is_compared(self):
    (self.folder / "train/d/0").write_bytes(b"State")
    self.assertEqual(self._found({"config", "params"}), [])
    self.assertEqual(self._found({"train"}), ["train/d/0"])
    (self.folder / "_CHECKPOINT_METADATA").write_bytes(b"[]")  # of the step
    self.assertEqual(self._found({"config"}), ["_CHECKPOINT_METADATA"])

  def test_message_names_step_item_file_and_the_other_steps(self):
    for count, rest in ((1, "missing$"), (4, "; and 3 more$")):
      damage = dict.fromkeys(map(str, range(count)), "missing")
      self.assertRegex(steps.describe(2, damage), rest)
    for step in ("4", "6"):
      _write(self.root / "checkpoints" / step)
    (self.root / "checkpoints/4/params/d/0").write_bytes(b"")
    pattern = (
      "checkpoint of step 4: damaged, item params, file d/0: 0 bytes, 2304000 "
      r"were written; other steps: \[2, 6\]$"
    )
    with self.assertRaisesRegex(steps.DamagedCheckpointError, pattern):
      steps.check_whole(self.root, 4)

  def test_newest_whole_step_is_found_and_later_ones_are_named(self):
    folder = self.root / "checkpoints"
    for step in ("4", "6"):
      _write(folder / step)
      (folder / step / "train/d/0").unlink()
    self.assertEqual(steps.find_step(self.root, None), 6)
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self.assertEqual(steps.newest_whole_step(self.root), 2)
    self.assertLen(logs.output, 3)
    steps.set_aside_after(self.root, 2)
    _write(folder / "4")
    steps.set_aside_after(self.root, 2)
    self.assertEqual(steps.list_steps(self.root), [2])
    aside = os.listdir(folder / "damaged")
    self.assertCountEqual(aside, ["4.1", "4.2", "6.1"])
