"""Documents of files of text, lines and tables, whatever is wrong with some."""

import functools
import gzip
import io
import itertools
import json
import os
import pickle
import shutil
import sys
from collections import Counter
from unittest import mock

import datasets
import fsspec
import pyarrow
import zstandard
from absl.testing import parameterized
from pyarrow import ipc, parquet

from moh_jax.data import arrow_files, text_files
from moh_jax.data.text_files import list_pieces, read_documents
from tests.folders import FolderTest

_DOCUMENTS = ["first", "zwei\n  Zeilen\r\n", "", "vier 🤷🏽‍♀️", "x" * 5000]
_TEXTS = [f"text {i} é" for i in range(2500)]  # three batches of a stream


def _lines(documents):
  lines = [json.dumps({"id": 1, "text": text}) for text in documents]
  return ("\n".join(lines) + "\n").encode()


def _zstd(content, frames=1):
  size = -(-len(content) // frames)
  parts = [content[i : i + size] for i in range(0, len(content), size)]
  return b"".join(pyarrow.compress(p, "zstd", asbytes=True) for p in parts)


class _FilesTest(FolderTest):
  def _read(self, *names, field="text", piece_bytes=10**6, bad=None):
    """Documents; the name and reason of what holds no text go to `bad`."""
    patterns = [n if "://" in n else str(self.root / n) for n in names]
    found = []
    for group in list_pieces(patterns, piece_bytes):
      for piece in pickle.loads(pickle.dumps(group)):
        for name, text in read_documents(piece, field):
          if isinstance(text, str):
            found.append((name, text))
          elif bad is None:
            raise text
          else:
            bad.append((name, text.reason))
    return found

  def _skip(self, *names, **options):
    """Documents, and the name and reason of what was left out."""
    bad = []
    return self._read(*names, bad=bad, **options), bad

  def _write(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path

  def _table(self, texts, column="text", rows=2):
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, self.root / "a.parquet", row_group_size=rows)


class LinesTest(_FilesTest):
  @parameterized.product(
    packed=(
      ("a.jsonl", bytes),
      ("a.jsonl", lambda x: x[:-1]),
      ("a.jsonl.gz", gzip.compress),
      ("A.JSONL.ZST", _zstd),
      *(("a.jsonl.zst", functools.partial(_zstd, frames=n)) for n in (2, 9)),
    ),
    piece_bytes=(1, 100, 10**6),
  )
  def test_are_documents_however_they_are_cut(self, packed, piece_bytes):
    name, pack = packed
    self._write(name, pack(_lines(_DOCUMENTS)))
    found = self._read(name, piece_bytes=piece_bytes)
    expected = [(f"{name}:{i + 1}", t) for i, t in enumerate(_DOCUMENTS)]
    self.assertEqual(found, expected)

  @parameterized.parameters(
    (b'{"text": "b"', "not JSON"),
    (b"[" * 3000, "not JSON"),
    (b"[1]", "no field 'text', found list"),
    (b'{"body": "b"}', r"no field 'text', found \['body'\]"),
    (b'{"text": 1}', "'text' is int, expected text"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
  )
  def test_damaged_line_is_named(self, line, message):
    content = b'{"text": "a"}\n' * 2 + line + b'\n{"text": "c"}\n'
    self._write("a.jsonl", content)
    for piece_bytes in (1, 10**6):
      with self.assertRaisesRegex(ValueError, f"a.jsonl, line 3: {message}"):
        self._read("a.jsonl", piece_bytes=piece_bytes)

  @parameterized.product(
    bad=[b"x" * 301, b" " * 301, b" " * 299 + b'{"text": "x"}', b"x" * 9999],
    place=[0, 3],
    piece_bytes=[1, 10**6],
    packed=[False, True],
  )
  def test_one_that_is_too_long_is_left_out_alone(
    self, bad, place, piece_bytes, packed
  ):
    lines = [json.dumps({"text": f"a{i}"}).encode() for i in range(3)]
    lines.insert(place, bad)
    name, content = "a.jsonl" + ".gz" * packed, b"\n".join(lines)
    self._write(name, gzip.compress(content) if packed else content)
    with mock.patch.object(text_files, "MOST_LINE_BYTES", 299):
      found, left_out = self._skip(name, piece_bytes=piece_bytes)
    numbers = [i + 1 for i in range(4) if i != place]
    expected = [(f"{name}:{n}", f"a{i}") for i, n in enumerate(numbers)]
    self.assertEqual(found, expected)
    self.assertEqual(left_out, [(f"{name}:{place + 1}", "too long")])

  @parameterized.parameters(1, 5000, 10**6)
  def test_empty_lines_are_counted(self, piece_bytes):
    self._write("a.jsonl", b"\n" * 9999 + b'{"text": "a"}\n\n\n{"text": "b"}')
    found = self._read("a.jsonl", piece_bytes=piece_bytes)
    self.assertEqual(found, [("a.jsonl:10000", "a"), ("a.jsonl:10003", "b")])

  def test_a_small_file_makes_no_endless_text(self):
    self._write("a.jsonl.zst", _zstd(b"\n" * (1 << 26)))
    with self.assertRaisesRegex(ValueError, "zst, line .*more than 33,554,432"):
      self._read("a.jsonl.zst")

  def test_links_in_a_circle_and_hidden_folders_are_left_out(self):
    for name in ("x/a.txt", "x/y/b.txt", ".hidden/c.txt"):
      self._write(name, name.encode())
    for name in ("x/one", "x/two", "x/y/three"):
      (self.root / name).symlink_to(self.root / "x")
    for pattern in ("**/*.txt", "**", "x/**/*.txt", "?/**/**"):
      found = [text for _, text in self._read(pattern)]
      self.assertEqual(found, ["x/a.txt", "x/y/b.txt"], pattern)

  @parameterized.parameters("truncated", "damaged", "other")
  def test_damage_of_zstandard_is_named(self, how):
    lines = [json.dumps({"text": f"{i * i} {i}"}) for i in range(20000)]
    content = bytearray(_zstd("\n".join(lines).encode()))
    if how == "truncated":
      del content[-5:]
    elif how == "damaged":
      content[len(content) // 2 :] = bytes(len(content) // 2)
    self._write("a.jsonl.zst", b"no zstd" if how == "other" else bytes(content))
    with self.assertRaisesRegex(
      ValueError, r"a.jsonl.zst, line \d+: damaged or truncated"
    ):
      self._read("a.jsonl.zst")

  @parameterized.product(window=(27, 28, 31), cut=(0, 5))
  def test_archives_of_zstandard_look_back_far(self, window, cut):
    options = zstandard.ZstdCompressionParameters(window_log=window)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    lines = _lines([f"{i * i} {i}" for i in range(2000)])
    content = packer.compress(lines) + packer.flush()
    size = zstandard.get_frame_parameters(content).window_size
    self.assertEqual(size, 1 << window)
    self._write("a.jsonl.zst", content[: len(content) - cut] * (2 - bool(cut)))
    found, left_out = self._skip("a.jsonl.zst")
    if cut:
      self.assertEqual(left_out[0][1], "damaged or truncated")
      self.assertLess(len(found), 2000)
    else:
      self.assertEqual((len(found), left_out), (4000, []))

  @parameterized.parameters("a.jsonl.gz", "a.jsonl.zst", "a.json.zst")
  def test_a_damaged_file_is_no_skipped_line(self, name):
    lines = _lines([f"{i * i} {i}" for i in range(2000)])
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    path, skipped = self._write(name, pack(lines)[:-9]), Counter()
    (pieces,) = list_pieces([str(path)], 10**6)
    with self.assertRaisesRegex(ValueError, f"{name}.*: damaged or trunc"):
      list(text_files.read_texts(pieces, "text", skipped))
    self.assertEmpty(skipped)

  def test_marks_at_the_start_of_files_are_dropped(self):
    rows = _lines("abc")
    for name, text in (("a.txt", b"text"), ("b.jsonl", rows), ("c.json", rows)):
      self._write(name, b"\xef\xbb\xbf" + b"\n" * (name == "c.json") + text)
    found = [text for _, text in self._read("*", piece_bytes=1)]
    self.assertEqual("".join(found), "textabcabc")


class TablesTest(_FilesTest):
  @parameterized.parameters(1, 10**6)
  def test_rows_are_documents_however_they_are_cut(self, piece_bytes):
    self._table([*_DOCUMENTS, None])
    found = self._read("a.parquet", piece_bytes=piece_bytes)
    texts = [*_DOCUMENTS, ""]
    expected = [(f"a.parquet:{i + 1}", t) for i, t in enumerate(texts)]
    self.assertEqual(found, expected)

  @parameterized.parameters(
    ("text", r"no column 'text', found \['id', 'body'\]"),
    ("id", "row 1: 'id' is int, expected"),
  )
  def test_other_columns_and_types_are_named(self, field, message):
    self._table(["a"], "body")
    with self.assertRaisesRegex(ValueError, message):
      self._read("a.parquet", field=field)

  def test_few_large_rows_are_read_at_a_time(self):
    self._table(["x" * (1 << 20), "y"] * 20, rows=40)
    with mock.patch.object(
      parquet.ParquetFile, "iter_batches", autospec=True, return_value=iter([])
    ) as batches:
      self._read("a.parquet")
    self.assertLess(batches.call_args.args[1], 64)
    with mock.patch.object(text_files, "MOST_BYTES", 1 << 19):
      found, left_out = self._skip("a.parquet")
    self.assertEqual([text for _, text in found], ["y"] * 20)
    self.assertEqual(left_out[0], ("a.parquet:1", "too long"))

  def test_only_the_damaged_group_of_parquet_is_left_out(self):
    texts = [f"{i * i} {i}" * 50 for i in range(400)]
    self._table(texts, rows=100)
    path = self.root / "a.parquet"
    content = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(1).column(1)
    place = start.data_page_offset + 500
    content[place : place + 500] = bytes(500)
    path.write_bytes(content)
    found, left_out = self._skip("a.parquet")
    self.assertLen(left_out, 1)
    whole = [f"a.parquet:{i + 1}" for i in (*range(100), *range(200, 400))]
    self.assertContainsSubset(whole, [name for name, _ in found])
    self.assertEqual(found[-1], ("a.parquet:400", texts[-1]))

  @parameterized.product(form=["file", "stream"], compression=[None, "zstd"])
  def test_only_the_damaged_batch_of_arrow_is_left_out(self, form, compression):
    texts = [f"{i * i} {i}" * 20 for i in range(50)]
    table = pyarrow.table({"text": texts})
    opened = ipc.new_file if form == "file" else ipc.new_stream
    options = ipc.IpcWriteOptions(compression=compression)
    sink, starts = pyarrow.BufferOutputStream(), []
    with opened(sink, table.schema, options=options) as writer:
      for batch in table.to_batches(max_chunksize=10):
        starts.append(sink.tell())
        writer.write_batch(batch)
    content = bytearray(sink.getvalue().to_pybytes())
    # The offsets of texts lie before these, where they are not compressed.
    at = starts[3] - 60 if compression else content.index(texts[20].encode())
    content[at - 40 : at - 10] = b"\7" * 30
    self._write("a.arrow", bytes(content))
    found, left_out = self._skip("a.arrow")
    self.assertEqual([t for _, t in found], texts[:20] + texts[30:])
    self.assertEqual(left_out, [("a.arrow:21", "damaged or truncated")])
    with self.assertRaisesRegex(ValueError, "a.arrow, row 21 or after: dam"):
      self._read("a.arrow")

  @parameterized.product(form=["file", "stream"], dictionary=[False, True])
  def test_arrow_that_unpacks_without_end_is_refused(self, form, dictionary):
    opened = ipc.new_file if form == "file" else ipc.new_stream
    for count, is_large in ((20, False), (300, True)):
      texts = pyarrow.array(["a" * (1 << 20)]).take([0] * count)
      texts = texts.cast(pyarrow.large_utf8())
      if dictionary:  # its one entry is as large
        texts = pyarrow.DictionaryArray.from_arrays([0], ["a" * (count << 20)])
      table = pyarrow.table({"text": texts})
      options = ipc.IpcWriteOptions(compression="zstd")
      path = self.root / "a.arrow"
      with opened(path, table.schema, options=options) as writer:
        writer.write_table(table)
      self.assertLess(path.stat().st_size, 1 << 20)
      if is_large:
        with self.assertRaisesRegex(ValueError, "a.arrow: unpacks to 314,"):
          arrow_files.open_arrow(os.fspath(path))
      else:
        read = arrow_files.open_arrow(os.fspath(path))[1].read_all()
        self.assertTrue(read.equals(table))

  @parameterized.parameters("a.parquet", "stream.arrow", "file.arrow")
  def test_rows_without_end_are_refused(self, name):
    table = pyarrow.table({"text": pyarrow.nulls(1 << 26)})
    if name == "a.parquet":
      table = table.cast(pyarrow.schema({"text": pyarrow.string()}))
      parquet.write_table(table, self.root / name)
    else:
      opened = ipc.new_file if name == "file.arrow" else ipc.new_stream
      with opened(self.root / name, table.schema) as writer:
        writer.write_table(table)
    with self.assertRaisesRegex(ValueError, f"{name}: 67,108,864 rows, must"):
      self._read(name)

  def test_a_small_table_has_no_endless_texts(self):
    large = pyarrow.array(["a" * (1 << 20)] * 300)
    one = pyarrow.DictionaryArray.from_arrays([0] * 300, ["a" * (1 << 20)])
    for texts, shared, unpacked in (
      *((large, False, "314,"), (large, True, "269,"), (one, True, "269,")),
    ):
      table = pyarrow.table({"text": texts})
      options = {"compression": "zstd", "use_dictionary": shared}
      parquet.write_table(table, self.root / "a.parquet", **options)
      self.assertLess((self.root / "a.parquet").stat().st_size, 1 << 20)
      with self.assertRaisesRegex(ValueError, f"unpacks to {unpacked}"):
        self._read("a.parquet")

  def test_a_small_packed_file_has_no_huge_document(self):
    self._write("a.txt.gz", gzip.compress(b"a" * (1 << 23)))
    self.assertLen(self._read("a.txt.gz"), 1)
    self._write("a.txt.gz", gzip.compress(b"a" * ((1 << 23) + 1)))
    with self.assertRaisesRegex(ValueError, "a.txt.gz: .* more than 8,388,608"):
      self._read("a.txt.gz")

  def test_what_is_no_text_has_null_bytes(self):
    self._write("a.txt", "letters of 16 bits".encode("utf-16-le"))
    with self.assertRaisesRegex(ValueError, "a.txt: no text: has null bytes"):
      self._read("a.txt")

  @parameterized.parameters(("cut", 10), ("other", 0), ("empty", 0))
  def test_what_is_no_whole_arrow_file_is_named_or_left_out(self, how, rows):
    table = pyarrow.table({"text": _TEXTS[:35]})
    with ipc.new_stream(self.root / "a.arrow", table.schema) as writer:
      writer.write_table(table, max_chunksize=10)
    content = (self.root / "a.arrow").read_bytes()
    end = content.index(b"text 18") if how == "cut" else 0
    self._write("a.arrow", content[:end] + b"other" * (how == "other"))
    with self.assertRaisesRegex(ValueError, r"a.arrow.*: damaged or truncated"):
      self._read("a.arrow")
    found, left_out = self._skip("a.arrow")
    self.assertEqual((len(found), len(left_out)), (rows, 1))


class PlacesTest(_FilesTest):
  """Folders of `datasets`, and addresses."""

  def setUp(self):
    super().setUp()
    rows = datasets.Dataset.from_dict({"text": _TEXTS})
    rows.save_to_disk(self.root / "set", num_shards=2)
    self.memory = fsspec.filesystem("memory")
    self.memory.pipe("/texts/a.jsonl", _lines(_TEXTS))
    self.addCleanup(self.memory.rm, "/texts", recursive=True)

  @parameterized.parameters("path", "file", "memory")
  def test_saved_folder_stands_for_its_arrow_files(self, kind):
    (self.root / "set/cache-1.arrow").write_bytes(b"no part of it")
    folder = {"path": "set", "file": f"file://{self.root}/set"}.get(kind)
    if kind == "memory":
      for path in (self.root / "set").iterdir():
        self.memory.pipe(f"/texts/set/{path.name}", path.read_bytes())
    found = self._read(folder or "memory://texts/set")
    self.assertEqual([text for _, text in found], _TEXTS)
    self.assertEqual(found[0][0], "data-00000-of-00002.arrow:1")
    self.assertEqual(found[-1][0], "data-00001-of-00002.arrow:1250")

  def test_damaged_folder_is_named(self):
    (self.root / "set/data-00000-of-00002.arrow").unlink()
    with self.assertRaisesRegex(FileNotFoundError, "no such file.*state"):
      self._read("set")
    for content in ("{}", "[]", '{"_data_files": [1]}', '{"_data_files": 3}'):
      (self.root / "set/state.json").write_text(content)
      with self.assertRaisesRegex(
        ValueError, r"set/state.json: .*(_data_files|object)"
      ):
        self._read("set")

  def test_files_of_any_file_system(self):
    table = io.BytesIO()
    parquet.write_table(
      pyarrow.table({"text": _TEXTS}), table, row_group_size=999
    )
    self.memory.pipe("/texts/deep/b.parquet", table.getvalue())
    self.memory.pipe("/texts/deep/c.jsonl.zst", _zstd(_lines(["packed"])))
    found = self._read("memory://texts/**", piece_bytes=1000)
    self.assertEqual([text for _, text in found], [*_TEXTS * 2, "packed"])
    self.assertEqual(found[0][0], "a.jsonl:1")
    self.assertEqual(found[-2][0], "deep/b.parquet:2500")
    self.assertEqual(self._read("memory://texts/a.jsonl"), found[:2500])

  @parameterized.parameters(
    (("memory://texts/no",), FileNotFoundError, "memory://texts/no: no such"),
    (("memory://texts/",), FileNotFoundError, "memory://texts/: no such"),
    (("nothing://a",), ValueError, "nothing://a: Protocol not known"),
    (("memory://texts/**", "a.txt"), ValueError, "mixed, as in .* file:///"),
    (("no.txt",), FileNotFoundError, "no.txt: no such file$"),
    (("folder",), FileNotFoundError, r"folder.*DIR/\*\*/\*"),
    ((), FileNotFoundError, "no input"),
  )
  def test_missing_input_is_named(self, patterns, error, message):
    (self.root / "a.txt").touch()
    (self.root / "folder").mkdir()
    with self.assertRaisesRegex(error, message):
      self._read(*patterns)

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
      self._read(address)

  def test_a_broken_connection_is_not_damage(self):
    class SlowError(Exception):
      pass

    fail = mock.Mock(side_effect=SlowError("too slow"))
    with (
      mock.patch.object(fsspec.implementations.memory.MemoryFile, "read", fail),
      self.assertRaisesRegex(OSError, "a.jsonl: cannot be read: too slow"),
    ):
      self._skip("memory://texts/a.jsonl")


class PiecesTest(_FilesTest):
  def _list(self, *globs, piece_bytes=1000):
    return list_pieces([str(self.root / g) for g in globs], piece_bytes)

  def test_pieces_are_as_small_as_lines_and_row_groups_allow(self):
    self._write("a.jsonl", b"".join(b'{"n": %d}\n' % i for i in range(40))[:-1])
    self._table([str(i) * 20 for i in range(100)], rows=15)
    for name, pieces in (("a.jsonl", 40), ("a.parquet", 7)):
      for piece_bytes, expected in ((1, pieces), (10**6, 1)):
        groups = self._list(name, piece_bytes=piece_bytes)
        self.assertLen([*itertools.chain(*groups)], expected)

  def test_plan_is_the_same_elsewhere_and_in_any_order(self):
    for name in ("x/a.txt", "x/b.jsonl"):
      self._write(name, b"{}\n" * 1000)
    plan = self._list("x/*")
    self.assertEqual(self._list("x/b.*", "x/a.txt", "x/*"), plan)
    shutil.move(self.root / "x", self.root / "y")
    same = text_files.fingerprint(plan)
    self.assertEqual(text_files.fingerprint(self._list("y/*")), same)
    self._write("y/a.txt", b"longer now")
    changed = text_files.fingerprint(self._list("y/*"))
    cut = text_files.fingerprint(self._list("y/*", piece_bytes=500))
    self.assertLen({same, changed, cut}, 3)
