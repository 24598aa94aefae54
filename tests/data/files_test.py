"""Documents of files of text, lines and tables, whatever is wrong with some."""

import functools
import gzip
import io
import json
import sys
from unittest import mock

import fsspec
import pyarrow
import zstandard
from absl.testing import parameterized
from pyarrow import ipc, parquet

from moh_jax.data.files import list_files, read_documents, read_texts
from tests.folders import FolderTest

_DOCUMENTS = ["first", "zwei\n  Zeilen\r\n", "", "vier 🤷🏽‍♀️", "x" * 5000]
_TEXTS = [f"text {i} é" for i in range(2500)]  # three batches of a stream


def _lines(documents):
  lines = [json.dumps({"id": 1, "text": text}) for text in documents]
  return ("\n".join(lines) + "\n").encode()


def _zstd(content, frames=1):
  size = -(-len(content) // frames)
  parts = [content[i : i + size] for i in range(0, len(content), size)]
  return b"".join(map(zstandard.compress, parts))


class _FilesTest(FolderTest):
  def _read(self, *names, field="text", bad=None):
    """Places and documents; what holds no text goes to `bad`."""
    found = []
    patterns = [n if "://" in n else str(self.root / n) for n in names]
    for file in list_files(patterns):
      for place, text in read_documents(file, field):
        place = place.removeprefix(f"{self.root}/")
        if isinstance(text, str):
          found.append((place, text))
        elif bad is None:
          raise text
        else:
          bad.append(place)
    return found

  def _write(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)

  def _table(self, texts, column="text", rows=2):
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, self.root / "a.parquet", row_group_size=rows)


class LinesTest(_FilesTest):
  @parameterized.parameters(
    ("a.jsonl", bytes),
    ("a.jsonl", lambda x: x[:-1]),
    ("a.ndjson", lambda x: b"\n\n" + x.replace(b"\n", b"\n\n")),
    ("a.jsonl.gz", gzip.compress),
    ("A.JSONL.ZST", _zstd),
    *(("a.jsonl.zst", functools.partial(_zstd, frames=n)) for n in (2, 9)),
  )
  def test_are_documents(self, name, pack):
    self._write(name, pack(_lines(_DOCUMENTS)))
    places, texts = zip(*self._read(name))
    self.assertEqual(list(texts), _DOCUMENTS)
    numbers = (3, 5, 7, 9, 11) if "ndjson" in name else (1, 2, 3, 4, 5)
    self.assertEqual(places, tuple(f"{name}:{n}" for n in numbers))

  @parameterized.parameters(
    (b'{"text": "b"', "not JSON"),
    (b"[" * 3000, "not JSON"),
    (b"[1]", "no JSON object, found list"),
    (b'{"body": "b"}', r"no field 'text', found \['body'\]"),
    (b'{"text": 1}', "'text' is int, expected text"),
    (b'{"text": "\xff"}', "not UTF-8"),
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
    ("a.jsonl.zst", _zstd, -5),
    ("a.jsonl.zst", lambda x: _zstd(x)[:-999] + bytes(999), None),
    ("a.jsonl.zst", lambda x: b"no zstd", None),
    ("a.json.zst", _zstd, -9),
    ("a.jsonl.gz", gzip.compress, -9),
    ("a.txt.gz", gzip.compress, -9),
    ("a.json", lambda x: b"[" + x, None),
    ("a.parquet", lambda x: x, None),
    ("a.arrow", lambda x: x, None),
  )
  def test_a_damaged_file_is_no_skipped_line(self, name, pack, end):
    lines = _lines([f"{i * i} {i}" for i in range(2000)])
    file, skipped = self._write(name, pack(lines)[:end]), []
    with self.assertRaisesRegex(ValueError, f"{name}: damaged or cannot be"):
      list(read_texts([file], "text", skipped))
    self.assertEmpty(skipped)

  @parameterized.product(window=(27, 31), cut=(0, 5))
  def test_archives_of_zstandard_look_back_far(self, window, cut):
    options = zstandard.ZstdCompressionParameters(window_log=window)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    lines = _lines([f"{i * i} {i}" for i in range(2000)])
    content = packer.compress(lines) + packer.flush()
    size = zstandard.get_frame_parameters(content).window_size
    self.assertEqual(size, 1 << window)
    self._write("a.jsonl.zst", content[: len(content) - cut] * (2 - bool(cut)))
    if cut:
      with self.assertRaisesRegex(ValueError, "damaged or cannot be read"):
        self._read("a.jsonl.zst")
    else:
      self.assertLen(self._read("a.jsonl.zst"), 4000)

  def test_marks_at_the_start_of_files_are_dropped(self):
    rows = _lines("abc")
    for name, text in (("a.txt", b"text"), ("b.jsonl", rows), ("c.json", rows)):
      self._write(name, b"\xef\xbb\xbf" + b"\n" * (name == "c.json") + text)
    found = [text for _, text in self._read("*")]
    self.assertEqual("".join(found), "textabcabc")

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

  @parameterized.parameters(
    ("text", r"no column 'text', found \['id', 'body'\]"),
    ("id", "a.parquet:1: 'id' is int, expected"),
  )
  def test_other_columns_and_types_are_named(self, field, message):
    self._table(["a"], "body")
    with self.assertRaisesRegex(ValueError, message):
      self._read("a.parquet", field=field)

  def test_damage_inside_ends_the_file(self):
    self._table([f"{i * i} {i}" * 50 for i in range(400)], rows=100)
    path = self.root / "a.parquet"
    content = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    place = start.data_page_offset + 500
    content[place : place + 500] = bytes(500)
    path.write_bytes(content)
    with self.assertRaisesRegex(ValueError, "a.parquet: damaged or cannot be"):
      self._read("a.parquet", bad=[])


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

  @parameterized.parameters(
    ("memory://texts/no", FileNotFoundError, "memory://texts/no: no such"),
    ("memory://texts/", FileNotFoundError, "memory://texts/: no such"),
    ("nothing://a", OSError, "nothing://a: cannot be read: Protocol not known"),
    ("no.txt", FileNotFoundError, "no.txt: no such file"),
    ("folder", FileNotFoundError, r"folder: .*DIR/\*\*/\*"),
  )
  def test_missing_input_is_named(self, pattern, error, message):
    (self.root / "folder").mkdir()
    with self.assertRaisesRegex(error, message):
      self._read(pattern)

  @parameterized.parameters(
    ("huggingface_hub", "hf://datasets/a/b.jsonl", OSError),
    ("zstandard", "memory:///texts/a.jsonl.zst", ValueError),
  )
  def test_missing_library_says_how_to_install_it(self, library, file, error):
    self.memory.pipe("/texts/a.jsonl.zst", b"")
    names = [n for n in sys.modules if n.partition(".")[0] == library]
    with (
      mock.patch.dict(sys.modules, dict.fromkeys([library, *names])),
      self.assertRaisesRegex(error, rf"{file}.*moh_jax\[llm\]"),
    ):
      self._read(file)
