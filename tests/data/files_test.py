"""Documents of files of text, lines and tables, whatever is wrong with some."""

import functools
import gzip
import io
import itertools
import json
import sys
from unittest import mock

import fsspec
import pyarrow
import zstandard
from absl.testing import parameterized
from pyarrow import ipc, parquet

from moh_jax.data.files import (
  files_by_split,
  list_files,
  read_documents,
  read_texts,
)
from tests.folders import FolderTest

_DOCUMENTS = ["first", "zwei\n  Zeilen\r\n", "", "vier 🤷🏽‍♀️", "x" * 5000]
_TEXTS = [f"text {i} é" for i in range(2500)]  # three batches of a stream


def _lines(documents):
  lines = [json.dumps({"id": 1, "text": text}) for text in documents]
  return ("\n".join(lines) + "\n").encode()


def _list(lines):
  """One list of the objects of some lines."""
  return b"[" + b",\n".join(lines.splitlines()) + b"]"


def _zstd(content, frames=1):
  size = -(-len(content) // frames)
  parts = [content[i : i + size] for i in range(0, len(content), size)]
  return b"".join(map(zstandard.compress, parts))


class _FilesTest(FolderTest):
  def _read(self, *names, field="text"):
    """Places and documents; raises what holds no text."""
    found = []
    patterns = [n if "://" in n else str(self.root / n) for n in names]
    for file in list_files(patterns):
      for place, text in read_documents(file, field):
        if not isinstance(text, str):
          raise text
        found.append((place.removeprefix(f"{self.root}/"), text))
    return found

  def _write(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


class LinesTest(_FilesTest):
  @parameterized.parameters(
    ("a.jsonl", lambda x: x[:-1]),
    ("a.ndjson", lambda x: b"\n\n" + x.replace(b"\n", b"\n\n")),
    ("a.jsonl.gz", gzip.compress),
    ("A.JSONL.ZST", _zstd),
    ("a.jsonl.zst", functools.partial(_zstd, frames=9)),
    ("a.json.gz", lambda x: gzip.compress(_list(x))),
  )
  def test_are_documents(self, name, pack):
    self._write(name, pack(_lines(_DOCUMENTS)))
    places, texts = zip(*self._read(name))
    self.assertEqual(list(texts), _DOCUMENTS)
    numbers = (3, 5, 7, 9, 11) if "ndjson" in name else (1, 2, 3, 4, 5)
    self.assertEqual(places, tuple(f"{name}:{n}" for n in numbers))

  @parameterized.parameters(
    (b'{"text": "b"', "not JSON: Expecting ',' delimiter at character 1[34]"),
    (b"[1]", "no JSON object, found list"),
    (b'{"body": "b"}', r"no field 'text', found \['body'\]"),
    (b'{"text": 1}', "'text' is int, no text"),
    (b'{"text": "\xff"}', "not JSON: 'utf-8'"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
  )
  def test_bad_line_is_named_or_left_out(self, line, message):
    file = self._write(
      "a.jsonl", b'{"text": "a"}\n' * 2 + line + b'\n{"text": "c"}\n'
    )
    with self.assertRaisesRegex(ValueError, f"a.jsonl:3: {message}"):
      self._read("a.jsonl")
    skipped: list[str] = []
    texts = list(read_texts([file], "text", skipped))
    self.assertEqual(texts, ["a", "a", "c"])
    self.assertRegex("".join(skipped), f"a.jsonl:3: {message}")

  @parameterized.parameters(
    ("a.jsonl.zst", lambda x: _zstd(x)[:-5]),
    ("a.jsonl.zst", lambda x: _zstd(x)[:-999] + bytes(999)),
    ("a.jsonl.gz", lambda x: gzip.compress(x)[:-9]),
    ("a.txt.gz", lambda x: gzip.compress(x)[:-9]),
    ("a.json", lambda x: b"[" + x),
    ("a.parquet", lambda x: x),
    ("a.arrow", lambda x: x),
  )
  def test_a_damaged_file_is_no_skipped_line(self, name, damaged):
    lines = _lines([f"{i * i} {i}" for i in range(2000)])
    file, skipped = self._write(name, damaged(lines)), []
    with self.assertRaisesRegex(ValueError, f"{name}: damaged or cannot be"):
      list(read_texts([file], "text", skipped))
    self.assertEmpty(skipped)

  def test_archives_of_zstandard_look_back_far(self):
    options = zstandard.ZstdCompressionParameters(window_log=31)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    content = packer.compress(_lines(_TEXTS)) + packer.flush()
    size = zstandard.get_frame_parameters(content).window_size
    self.assertEqual(size, 1 << 31)
    self._write("a.jsonl.zst", content * 2)
    self.assertLen(self._read("a.jsonl.zst"), 2 * len(_TEXTS))

  def test_marks_at_the_start_of_files_are_dropped(self):
    rows = _lines("abc")
    for name, text in (
      ("a.txt", b"text"), ("b.jsonl", rows), ("c.json", b"\n" + rows),
      ("d.json", b"\n" + _list(rows)),
    ):  # fmt: skip
      self._write(name, b"\xef\xbb\xbf" + text)
    found = [text for _, text in self._read("*")]
    self.assertEqual("".join(found), "text" + "abc" * 3)

  def test_plain_text_is_one_document(self):
    self._write("a.txt", "é\r\n".encode())
    self.assertEqual(self._read("a.txt"), [("a.txt", "é\r\n")])
    self._write("a.txt", b"\xff")
    with self.assertRaisesRegex(ValueError, "a.txt: not UTF-8"):
      self._read("a.txt")


class TablesTest(_FilesTest):
  @parameterized.parameters("a.parquet", "a.arrow")
  def test_rows_are_documents(self, name):
    texts = [*_DOCUMENTS, None]
    table = pyarrow.table({"id": range(6), "text": texts})
    if name == "a.parquet":
      parquet.write_table(table, self.root / name, row_group_size=2)
    else:
      with ipc.new_stream(self.root / name, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    expected = [(f"{name}:{i + 1}", t or "") for i, t in enumerate(texts)]
    self.assertEqual(self._read(name), expected)

  def test_other_columns_are_named(self):
    table = pyarrow.table({"id": [0], "body": ["a"]})
    parquet.write_table(table, self.root / "a.parquet")
    with self.assertRaisesRegex(ValueError, r"no column 'text', .*'body'\]"):
      self._read("a.parquet")

  def test_damage_inside_ends_the_file(self):
    table = pyarrow.table({"text": [f"{i * i} {i}" * 50 for i in range(400)]})
    path = self.root / "a.parquet"
    parquet.write_table(table, path, row_group_size=100)
    content = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    place = start.data_page_offset + 500
    content[place : place + 500] = bytes(500)
    path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, "a.parquet: damaged or cannot be"):
      list(read_texts([str(path)], "text", []))


class PlacesTest(_FilesTest):
  """Files at addresses."""

  def setUp(self):
    super().setUp()
    self.memory = fsspec.filesystem("memory")
    self.memory.pipe("/texts/a.jsonl", _lines(_TEXTS))
    self.addCleanup(self.memory.rm, "/texts", recursive=True)

  def test_files_of_any_file_system(self):
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": _TEXTS}), table)
    self.memory.pipe("/texts/deep/b.parquet", table.getvalue())
    self.memory.pipe("/texts/deep/c.jsonl.zst", _zstd(_lines(["packed"])))
    self._write("d.jsonl", _lines(["local"]))
    found = self._read("memory://texts/**", "d.jsonl")
    texts = ["local", *_TEXTS * 2, "packed"]
    self.assertCountEqual([text for _, text in found], texts)

  def test_what_datasets_writes_beside_its_data_is_none(self):
    names = "train.jsonl", "dataset_train.jsonl", "dataset_2/a.jsonl"
    for name in (*names, "dataset_info.json", "state.json", "cache-1.jsonl"):
      self._write(name, _lines(["a"]))
    found = files_by_split(self.root, (".jsonl", ".json"))
    self.assertCountEqual(itertools.chain(*found.values()), names)

  @parameterized.parameters(
    ("memory://texts/no", FileNotFoundError, "memory://texts/no: no such"),
    ("nothing://a", OSError, "nothing://a: cannot be read: Protocol not known"),
    ("no.txt", FileNotFoundError, "no.txt: no such file"),
    ("folder", FileNotFoundError, r"folder: is a folder; .*folder/\*\*/\*'"),
  )
  def test_missing_input_is_named(self, pattern, error, message):
    (self.root / "folder").mkdir()
    with self.assertRaisesRegex(error, message):
      self._read(pattern)

  def test_missing_library_says_how_to_install_it(self):
    self._write("a.jsonl.zst", b"")
    with (
      mock.patch.dict(sys.modules, zstandard=None),
      self.assertRaisesRegex(
        ValueError, r"a.jsonl.zst.*pip install .\.\[llm\]"
      ),
    ):
      self._read("a.jsonl.zst")
