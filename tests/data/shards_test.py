"""Sets of shards: written, continued, damaged."""

import resource

from absl.testing import parameterized

from moh_jax.config.registry import MissingSplitError
from moh_jax.data import shards
from moh_jax.data.shards import ShardWriter
from tests.folders import FolderTest

_SHARD = "00001-of-00003.array_record"


class _SetTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.folder = self.root / "set"

  def _writer(self, num_shards=3, **settings):
    settings = {"size": 8, **settings}
    return ShardWriter(self.folder, "images", num_shards, settings)

  def _fill(self, writer, only=None):
    for shard in writer.todo() if only is None else only:
      with writer.open(shard) as target:
        for item in range(4 * shard, min(4 * shard + 4, 10)):
          target.add({"label": item}, f"item {item}\n".encode())
    return writer

  def _whole(self):
    return self._fill(self._writer()).finish()

  def _labels(self):
    read = shards.Shards(self.folder, "images")
    return [read[i][0]["label"] for i in range(len(read))]


class ReadTest(_SetTest):
  def test_damaged_record_is_named(self):
    self._whole()
    path = self.folder / _SHARD
    content = path.read_bytes()
    self.assertEqual(content.count(b"item 6\n"), 1)
    path.write_bytes(content.replace(b"item 6\n", b"item 9\n"))
    read = shards.Shards(self.folder, "images")
    self.assertEqual(read[5][0], {"label": 5})
    with self.assertRaisesRegex(ValueError, rf"{_SHARD}\[2\]: damaged"):
      read[6]

  @parameterized.parameters(
    ("metadata.json", "", "{}", "json: .*missing required field `format`"),
    ("metadata.json", ": 2,", ": 1,", "'images', 1.* expected .'images', 2"),
    ("metadata.json", "images", "latents", "'latents', 2.* expected .'images'"),
    (_SHARD, "", "x", f"{_SHARD}: missing, truncated or of another set"),
  )
  def test_what_is_damaged_or_of_another_kind_is_named(
    self, name, old, new, reason
  ):
    self._whole()
    path = self.folder / name
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    with self.assertRaisesRegex(ValueError, reason):
      self._labels()

  def test_unfinished_and_absent_sets_are_told_apart(self):
    with self.assertRaisesRegex(MissingSplitError, "set: no such directory"):
      self._labels()
    self._fill(self._writer())
    with self.assertRaisesRegex(FileNotFoundError, "json: no such"):
      self._labels()


class WriteTest(_SetTest):
  def test_skipped_items_are_listed(self):
    writer = self._fill(self._writer(), only=[0])
    with writer.open(1) as target:  # an empty shard between others
      for item in range(4):
        target.skip(f"{item}: bad")
    with writer.open(2) as target:
      target.add({"label": 8}, b"item 8\n")
      target.skip("ant/9.jpg: not\nan image")
    # The notes outlive an interruption.
    metadata = self._writer().finish(packed_from="here")
    self.assertEqual((metadata["examples"], metadata["skipped"]), (5, 5))
    self.assertEqual(metadata["packed_from"], "here")
    listed = (self.folder / shards.SKIPPED).read_text().splitlines()
    self.assertEqual(listed[3:], ["3: bad", "ant/9.jpg: not an image"])
    self.assertEqual(self._labels(), [0, 1, 2, 3, 8])

  def test_full_disk_leaves_finished_shards_whole(self):
    writer = self._fill(self._writer(), only=[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    with (
      self.assertRaisesRegex(
        OSError, "File too large.*finished ones are whole"
      ),
      writer.open(1) as target,
    ):
      target.add({"label": 0}, bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = self._writer()
    self.assertEqual(again.todo(), [1, 2])
    self._fill(again).finish()
    self.assertLen(self._labels(), 10)
