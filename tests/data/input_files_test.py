import io
import json
import pickle
import sys
from unittest import mock

import datasets
import fsspec
import pyarrow
from absl.testing import absltest, parameterized
from pyarrow import parquet

from moh_jax.data.text_files import list_pieces, read_documents
from tests.data.folder import FolderTest

_TEXTS = [f"text {i} é" for i in range(2500)]  # three batches of a stream


def _read(*patterns, field="text", on_bad=None, piece_bytes=10**6):
  options = {"on_bad": on_bad} if on_bad else {}
  return [
    document
    for group in list_pieces([str(p) for p in patterns], piece_bytes)
    for piece in group
    for document in read_documents(
      pickle.loads(pickle.dumps(piece)), field, **options
    )
  ]


class _FolderTest(FolderTest):
  def _save(self, name, texts=_TEXTS, **options):
    rows = {"id": list(range(len(texts))), "text": texts}
    datasets.Dataset.from_dict(rows).save_to_disk(self.root / name, **options)


class SavedDatasetTest(_FolderTest):
  @parameterized.parameters("", "file://")
  def test_folder_stands_for_its_arrow_files(self, protocol):
    self._save("set", num_shards=2)
    (self.root / "set" / "cache-1.arrow").write_bytes(b"no part of it")
    found = _read(f"{protocol}{self.root / 'set'}")
    self.assertEqual([text for _, text in found], _TEXTS)
    self.assertEqual(found[0][0], "data-00000-of-00002.arrow:1")
    self.assertEqual(found[-1][0], "data-00001-of-00002.arrow:1250")

  def test_damaged_folder_is_named(self):
    self._save("set")
    (self.root / "set" / "data-00000-of-00001.arrow").unlink()
    with self.assertRaisesRegex(
      FileNotFoundError, "arrow: no such file.*state"
    ):
      _read(self.root / "set")
    for content in ("{}", "[]", '{"_data_files": [1]}', '{"_data_files": 3}'):
      (self.root / "set" / "state.json").write_text(content)
      with self.assertRaisesRegex(
        ValueError, r"set/state.json: .*(_data_files|object)"
      ):
        _read(self.root / "set")


class ArrowTest(_FolderTest):
  def _write(self, values, kind="stream"):
    table = pyarrow.table({"text": values})
    path = self.root / "a.arrow"
    new = {"stream": pyarrow.ipc.new_stream, "footer": pyarrow.ipc.new_file}
    with new[kind](path, table.schema) as writer:
      writer.write_table(table, max_chunksize=10)
    return path

  @parameterized.parameters("cut", "other", "empty")
  def test_damage_is_named_or_skipped(self, how):
    path = self._write(_TEXTS[:35])
    content = path.read_bytes()
    rows = {"cut": 10, "other": 0, "empty": 0}[how]
    end = content.index(b"text 18") if how == "cut" else 0
    path.write_bytes(content[:end] + b"other" * (how == "other"))
    with self.assertRaisesRegex(ValueError, r"a.arrow.*: damaged or truncated"):
      _read(path)
    problems = []
    found = _read(path, on_bad=lambda *problem: problems.append(problem))
    self.assertLen(found, rows)
    self.assertLen(problems, 1)

  def test_rows_that_are_not_utf8_are_skipped(self):
    binary = pyarrow.array([b"a", b"\xff", b"c"])
    path = self._write(binary.view(pyarrow.string()))
    problems = []
    found = _read(path, on_bad=lambda *problem: problems.append(problem))
    self.assertEqual(found, [("a.arrow:1", "a"), ("a.arrow:3", "c")])
    ((name, problem),) = problems
    self.assertEqual((name, problem.reason), ("a.arrow:2", "not UTF-8"))

  def test_only_the_damaged_group_of_a_parquet_table_is_skipped(self):
    path = self.root / "a.parquet"
    texts = [f"{i * i} {i}" * 50 for i in range(400)]
    parquet.write_table(
      pyarrow.table({"text": texts}), path, row_group_size=100
    )
    content = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    place = start.data_page_offset + 500
    content[place : place + 500] = bytes(500)
    path.write_bytes(content)
    problems = []
    found = _read(path, on_bad=lambda *problem: problems.append(problem))
    self.assertLen(problems, 1)
    names = [name for name, _ in found]
    self.assertContainsSubset(
      [f"a.parquet:{i + 1}" for i in (*range(100), *range(200, 400))], names
    )
    self.assertEqual(found[-1], ("a.parquet:400", texts[-1]))


class AddressTest(_FolderTest):
  def setUp(self):
    super().setUp()
    self.memory = fsspec.filesystem("memory")
    self.addCleanup(self.memory.rm, "/texts", recursive=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS)
    self.memory.pipe("/texts/a.jsonl", rows.encode())
    table = io.BytesIO()
    parquet.write_table(
      pyarrow.table({"text": _TEXTS}), table, row_group_size=999
    )
    self.memory.pipe("/texts/deep/b.parquet", table.getvalue())

  def test_files_of_any_file_system(self):
    found = _read("memory://texts/**", piece_bytes=1000)
    self.assertEqual([text for _, text in found], _TEXTS * 2)
    self.assertEqual(found[0][0], "a.jsonl:1")
    self.assertEqual(found[-1][0], "deep/b.parquet:2500")
    self.assertEqual(_read("memory://texts/a.jsonl"), found[:2500])

  def test_arrow_streams_and_packed_lines(self):
    self._save("set")
    for path in (self.root / "set").iterdir():
      self.memory.pipe(f"/texts/set/{path.name}", path.read_bytes())
    found = _read("memory://texts/set")
    self.assertEqual([text for _, text in found], _TEXTS)
    packed = pyarrow.compress(b'{"text": "packed"}', "zstd", asbytes=True)
    self.memory.pipe("/texts/c.jsonl.zst", packed)
    self.assertEqual(
      _read("memory://texts/c.jsonl.zst"), [("c.jsonl.zst:1", "packed")]
    )

  def test_missing_files_and_protocols_are_named(self):
    (self.root / "a.txt").write_text("text")
    for patterns, error, message in (
      (["memory://texts/no"], FileNotFoundError, "memory://texts/no: no such"),
      (["memory://texts/"], FileNotFoundError, "memory://texts/: no such"),
      (["nothing://a"], ValueError, "nothing://a: Protocol not known"),
      (
        ["memory://texts/**", str(self.root / "a.txt")],
        ValueError,
        "cannot be mixed, as in .* file:///PATH",
      ),
    ):
      with self.assertRaisesRegex(error, message):
        _read(*patterns)

  @parameterized.parameters(
    ("fsspec", "memory://texts/a.jsonl"),
    ("huggingface_hub", "hf://datasets/a/b.jsonl"),
  )
  def test_missing_library_says_how_to_install_it(self, library, address):
    names = [n for n in sys.modules if n.partition(".")[0] == library]
    with (
      mock.patch.dict(sys.modules, dict.fromkeys([library, *names])),
      self.assertRaisesRegex(ValueError, rf"{address}.*moh_jax\[llm\]"),
    ):
      list_pieces([address], 10**6)

  def test_a_broken_connection_is_not_damage(self):
    class SlowError(Exception):
      pass

    def fail(*_):
      raise SlowError("too slow")

    ((piece,),) = list_pieces(["memory://texts/a.jsonl"], 10**6)
    problems = []
    with (
      mock.patch.object(fsspec.implementations.memory.MemoryFile, "read", fail),
      self.assertRaisesRegex(OSError, "a.jsonl: cannot be read: too slow"),
    ):
      list(read_documents(piece, "text", lambda *x: problems.append(x)))
    self.assertEmpty(problems)


class ByteOrderMarkTest(_FolderTest):
  def test_marks_at_the_start_of_files_are_dropped(self):
    (self.root / "a.txt").write_text("text", encoding="utf-8-sig")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in "abc")
    (self.root / "b.jsonl").write_text(rows, encoding="utf-8-sig")
    (self.root / "c.jsonl").write_text("\n" + rows, encoding="utf-8-sig")
    found = [text for _, text in _read(self.root / "*", piece_bytes=1)]
    self.assertEqual("".join(found), "textabcabc")


if __name__ == "__main__":
  absltest.main()
