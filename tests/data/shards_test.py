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

  def _files(self):
    paths = sorted(path for path in self.folder.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in paths}

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
    with self.assertRaises(IndexError):
      read[10]

  @parameterized.parameters(
    ("metadata.json", "{", "metadata.json: not valid JSON"),
    ("metadata.json", "{}", "metadata.json: .*missing required field `format`"),
    ("metadata.json", '"latents"', "'latents' of version 2, expected 'images'"),
    ("metadata.json", "2", "'images' of version 1, expected"),
    (_SHARD, "x", f"{_SHARD}: missing, truncated or of another set"),
    (_SHARD, None, f"{_SHARD}: missing, truncated or of another set"),
  )
  def test_what_is_damaged_is_named(self, name, text, reason):
    self._whole()
    path = self.folder / name
    if text is None:
      path.unlink()
    elif " of version " in reason:  # in place of one word
      word = '"images"' if "latents" in reason else "2"
      text = text if word != "2" else "1"
      path.write_text(path.read_text().replace(word, text, 1))
    else:
      path.write_text(text)
    with self.assertRaisesRegex(ValueError, reason):
      shards.Shards(self.folder, "images")

  def test_unfinished_and_absent_sets_are_told_apart(self):
    with self.assertRaisesRegex(MissingSplitError, "set: no such directory"):
      self._labels()
    self._fill(self._writer())
    with self.assertRaisesRegex(FileNotFoundError, "json: .* written last"):
      self._labels()


class WriteTest(_SetTest):
  def test_interrupted_set_continues_to_the_same_bytes(self):
    self._whole()
    whole = self._files()
    for path in whole:
      (self.folder / path).unlink()
    writer = self._fill(self._writer(), only=[1])
    with self.assertRaises(KeyboardInterrupt), writer.open(0) as target:
      target.add({"label": 0}, b"item 0\n")
      raise KeyboardInterrupt
    written = list(self.folder.glob("*.array_record"))
    self.assertEqual(written, [self.folder / _SHARD])
    kept = (self.folder / _SHARD).stat().st_mtime_ns
    again = self._writer()
    self.assertEqual(again.todo(), [0, 2])
    self._fill(again).finish()
    self.assertEqual(self._files(), whole)
    self.assertEqual((self.folder / _SHARD).stat().st_mtime_ns, kept)
    self.assertEmpty(self._writer().todo())

  def test_other_settings_are_named_and_refused(self):
    self._fill(self._writer(), only=[0])
    for name, ours, theirs in (("size", 16, 8), ("num_shards", 5, 3)):
      message = f"{name}: {ours} here, {theirs} there"
      with self.assertRaisesRegex(ValueError, message):
        self._writer(**{name: ours})

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
