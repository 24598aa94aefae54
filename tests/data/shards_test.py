import json
import pathlib
import resource
import tempfile

from absl.testing import absltest, parameterized

from moh_jax.data import shards
from moh_jax.data.shard_writer import ShardSetWriter

_KIND = "images"


class _SetTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / "set"

  def _writer(self, items=10, shard_size=4, **settings):
    return ShardSetWriter(
      self.folder,
      _KIND,
      items=items,
      shard_size=shard_size,
      settings={"size": 8, **settings},
      notes={"class_names": ["ant"]},
    )

  def _fill(self, writer, only=None):
    for shard in writer.todo() if only is None else only:
      with writer.open(shard) as target:
        for item in writer.items(shard):
          target.add({"label": item}, f"item {item}\n".encode())
    return writer

  def _whole(self, **options):
    return self._fill(self._writer(**options)).finish()

  def _files(self):
    return {
      path.name: path.read_bytes()
      for path in sorted(self.folder.iterdir())
      if path.is_file()
    }


class ReadTest(_SetTest):
  def _labels(self, read, indices):
    return [read[i][0]["label"] for i in indices]

  def test_empty_shard_between_others(self):
    writer = self._fill(self._writer(), only=[0, 2])
    with writer.open(1) as target:
      for item in writer.items(1):
        target.skip(str(item), "bad")
    metadata = writer.finish()
    read = shards.Shards(self.folder, _KIND)
    labels = [read[i][0]["label"] for i in range(len(read))]
    self.assertEqual(labels, [0, 1, 2, 3, 8, 9])
    self.assertEqual((metadata["examples"], metadata["skipped"]), (6, 4))

  def test_truncated_shard_is_named(self):
    self._whole()
    path = self.folder / "00002-of-00003.array_record"
    path.write_bytes(path.read_bytes()[:1000])
    with self.assertRaisesRegex(
      ValueError, r"truncated .*: 00002-of-00003.array_record \(1000 bytes\)"
    ):
      shards.Shards(self.folder, _KIND)

  def test_damaged_record_is_named(self):
    self._whole()
    path = self.folder / "00001-of-00003.array_record"
    content = path.read_bytes()
    self.assertEqual(content.count(b"item 6\n"), 1)
    path.write_bytes(content.replace(b"item 6\n", b"item 9\n"))
    read = shards.Shards(self.folder, _KIND)
    self.assertEqual(read[5][0], {"label": 5})
    with self.assertRaisesRegex(
      ValueError, r"00001-of-00003.array_record\[2\]: damaged record"
    ):
      read[6]

  @parameterized.parameters(
    ("{", "metadata.json: not valid JSON"),
    ("[]", "metadata.json: must be 'object', not array"),
    ('{"format": "latents", "version": 1}', "'latents' of version 1, expected"),
    ('{"format": "images", "version": 9}', "'images' of version 9, expected"),
  )
  def test_other_metadata_is_refused(self, text, reason):
    self._whole()
    (self.folder / shards.METADATA).write_text(text)
    with self.assertRaisesRegex(ValueError, reason):
      shards.Shards(self.folder, _KIND)

  def test_set_that_is_written_anew_is_read_anew(self):
    self._whole()
    first = self._labels(shards.Shards(self.folder, _KIND), range(10))
    for path in self.folder.iterdir():
      path.unlink()
    writer = self._writer()
    for shard in writer.todo():
      with writer.open(shard) as target:
        for item in writer.items(shard):
          target.add({"label": item + 1}, b"")
    writer.finish()
    again = self._labels(shards.Shards(self.folder, _KIND), range(10))
    self.assertEqual(again, [label + 1 for label in first])


class DamageTest(_SetTest):
  def test_whole_sets_and_older_ones_have_none(self):
    self._whole()
    self.assertEmpty(shards.damage(self.folder))
    metadata = json.loads((self.folder / shards.METADATA).read_text())
    for entry in metadata["shards"]:
      del entry["xxh3"]
    (self.folder / shards.METADATA).write_text(json.dumps(metadata))
    self.assertEmpty(shards.damage(self.folder))

  def test_altered_and_missing_shards_are_named(self):
    self._whole()
    first, second, _ = sorted(self.folder.glob("*.array_record"))
    content = bytearray(first.read_bytes())
    content[-40] ^= 1
    first.write_bytes(content)
    second.unlink()
    self.assertEqual(
      shards.damage(self.folder),
      [
        f"{first}: its content is not what was written",
        f"{second}: no such file",
      ],
    )


class WriteTest(_SetTest):
  @parameterized.parameters("finish", "discard")
  def test_files_of_others_are_not_removed(self, end):
    others = [
      self.folder / name / "a.txt" for name in ("unfinished", "skipped")
    ]
    for file in others:
      file.parent.mkdir(parents=True)
      file.write_text("mine")
    getattr(self._fill(self._writer()), end)()
    self.assertEqual([file.read_text() for file in others], ["mine"] * 2)
    self.assertEqual(list(others[0].parent.iterdir()), others[:1])

  def test_interrupted_set_continues_to_the_same_bytes(self):
    self._whole()
    whole = self._files()
    for path in self.folder.iterdir():
      path.unlink()
    writer = self._fill(self._writer(), only=[1])
    with self.assertRaises(KeyboardInterrupt), writer.open(0) as target:
      target.add({"label": 0}, b"item 0\n")
      raise KeyboardInterrupt
    self.assertEqual(
      list(self.folder.glob("*.array_record")),
      [self.folder / "00001-of-00003.array_record"],
    )
    kept = (self.folder / "00001-of-00003.array_record").stat().st_mtime_ns
    again = self._writer()
    self.assertEqual(again.todo(), [0, 2])
    self._fill(again).finish()
    self.assertEqual(self._files(), whole)
    stat = (self.folder / "00001-of-00003.array_record").stat()
    self.assertEqual(stat.st_mtime_ns, kept)

  @parameterized.parameters(True, False)
  def test_damaged_shard_of_a_whole_set_is_written_again(self, truncated):
    self._whole()
    whole = self._files()
    path = self.folder / "00001-of-00003.array_record"
    if truncated:
      path.write_bytes(b"")
    else:
      path.unlink()
    writer = self._writer()
    self.assertEqual(writer.todo(), [1])
    self._fill(writer).finish()
    self.assertEqual(self._files(), whole)

  @parameterized.parameters(True, False)
  def test_other_settings_are_named_and_refused(self, whole):
    writer = self._fill(self._writer())
    if whole:
      writer.finish()
    for changed, message in (
      ({"size": 16}, "size: 16 here, 8 there"),
      ({"shard_size": 5}, "shard_size: 5 here, 4 there"),
      ({"items": 11}, "items: 11 here, 10 there"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        self._writer(**changed)

  def test_skipped_items_are_listed(self):
    writer = self._fill(self._writer(), only=[0, 1])
    with writer.open(2) as target:
      target.add({"label": 8}, b"item 8\n")
      target.skip("ant/9.jpg", "not an image")
    # The note outlives an interruption.
    metadata = self._writer().finish()
    self.assertEqual(metadata["skipped"], 1)
    self.assertEqual(
      (self.folder / "skipped" / "00002-of-00003.txt").read_text(),
      "ant/9.jpg: not an image\n",
    )

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
    self.assertLen(shards.Shards(self.folder, _KIND), 10)

  def test_shards_of_nobody_are_not_touched(self):
    self._whole()
    (self.folder / shards.METADATA).unlink()
    with self.assertRaisesRegex(ValueError, "shards without metadata.json"):
      self._writer()


if __name__ == "__main__":
  absltest.main()
