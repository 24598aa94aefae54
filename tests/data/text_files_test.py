import gzip
import itertools
import json
import os
import shutil
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.data import text_files
from moh_jax.data import text_files as text_pieces
from moh_jax.data.text_files import list_pieces, read_documents
from tests.data.folder import FolderTest

_DOCUMENTS = ["first", "zwei\n  Zeilen\r\n", "", "vier 🤷🏽‍♀️", "x" * 5000]


def _lines(documents, field="text"):
  lines = [json.dumps({"id": 1, field: text}) for text in documents]
  return ("\n".join(lines) + "\n").encode()


class _FilesTest(FolderTest):
  def _read(self, name, content=None, field="text", piece_bytes=100, **options):
    if content is not None:
      (self.root / name).write_bytes(content)
    groups = list_pieces([str(self.root / name)], piece_bytes)
    return [
      document
      for group in groups
      for piece in group
      for document in read_documents(piece, field, **options)
    ]

  def _skip(self, *args, **options):
    """Documents, and what was left out."""
    bad = []

    def on_bad(name, problem):
      bad.append((name, problem.reason))

    return self._read(*args, **options, on_bad=on_bad), bad


class ReadTest(_FilesTest):
  @parameterized.parameters(1, 100, 10**6)
  def test_lines_are_documents_however_they_are_cut(self, piece_bytes):
    expected = [(f"a.jsonl:{i + 1}", t) for i, t in enumerate(_DOCUMENTS)]
    content = _lines(_DOCUMENTS)
    found = self._read("a.jsonl", content, piece_bytes=piece_bytes)
    self.assertEqual(found, expected)
    found = self._read("a.jsonl", content[:-1], piece_bytes=piece_bytes)
    self.assertEqual(found, expected)


class DamageTest(_FilesTest):
  @parameterized.parameters(
    (b'{"text": "b"', "a.jsonl, line 3: not JSON"),
    (b"[1]", "a.jsonl, line 3: no field 'text', found list"),
    (b'{"body": "b"}', r"a.jsonl, line 3: no field 'text', found \['body'\]"),
    (b'{"text": 1}', "a.jsonl, line 3: 'text' is int, expected text"),
    (b'{"text": "\xff"}', "a.jsonl, line 3: not UTF-8"),
    (b'{"text": "\\ud800"}', "a.jsonl, line 3: half a surrogate pair"),
  )
  def test_damaged_line_is_named(self, line, message):
    content = b'{"text": "a"}\n' * 2 + line + b'\n{"text": "c"}\n'
    for piece_bytes in (1, 10**6):
      with self.assertRaisesRegex(ValueError, message):
        self._read("a.jsonl", content, piece_bytes=piece_bytes)

  @parameterized.product(
    bad=[b"x" * 301, b" " * 301, b" " * 299 + b'{"text": "x"}', b"x" * 9999],
    place=[0, 1, 3],
    piece_bytes=[1, 10**6],
    packed=[False, True],
  )
  def test_a_line_that_is_too_long_is_left_out_alone(
    self, bad, place, piece_bytes, packed
  ):
    lines = [json.dumps({"text": f"a{i}"}).encode() for i in range(3)]
    lines.insert(place, bad)
    name, content = "a.jsonl", b"\n".join(lines)
    if packed:
      name, content = "a.jsonl.gz", gzip.compress(content)
    with mock.patch.object(text_files, "MOST_LINE_BYTES", 299):
      found, left_out = self._skip(name, content, piece_bytes=piece_bytes)
    numbers = [i + 1 for i in range(4) if i != place]
    expected = [(f"{name}:{n}", f"a{i}") for i, n in enumerate(numbers)]
    self.assertEqual(found, expected)
    self.assertEqual(left_out, [(f"{name}:{place + 1}", "too long")])


class WithZstandardTest(_FilesTest):
  def _pack(self, content, frames=1):
    import pyarrow

    size = -(-len(content) // frames)
    parts = [content[i : i + size] for i in range(0, len(content), size)]
    packed = [pyarrow.compress(part, "zstd", asbytes=True) for part in parts]
    return b"".join(packed)

  @parameterized.parameters(1, 2, 50)
  def test_lines_in_any_number_of_frames(self, frames):
    content = self._pack(_lines(_DOCUMENTS), frames)
    found = self._read("a.jsonl.zst", content)
    expected = [(f"a.jsonl.zst:{i + 1}", t) for i, t in enumerate(_DOCUMENTS)]
    self.assertEqual(found, expected)

  @parameterized.parameters("truncated", "damaged", "other")
  def test_damage_is_named(self, how):
    lines = [json.dumps({"text": f"{i * i} {i}"}) for i in range(99999)]
    content = bytearray(self._pack("\n".join(lines).encode()))
    if how == "truncated":
      del content[-5:]
    elif how == "damaged":
      content[len(content) // 2 :] = bytes(len(content) // 2)
    else:
      content = b"no zstandard"
    with self.assertRaisesRegex(
      ValueError, r"a.jsonl.zst, line \d+: damaged or truncated"
    ):
      self._read("a.jsonl.zst", bytes(content))


class WithPyarrowTest(_FilesTest):
  def _write(self, values, column="text", rows=2):
    import pyarrow
    from pyarrow import parquet

    path = self.root / "a.parquet"
    parquet.write_table(
      pyarrow.table({"id": list(range(len(values))), column: values}),
      path,
      row_group_size=rows,
    )
    return path

  @parameterized.parameters(1, 10**6)
  def test_rows_are_documents_however_they_are_cut(self, piece_bytes):
    self._write([*_DOCUMENTS, None])
    found = self._read("a.parquet", piece_bytes=piece_bytes)
    texts = [*_DOCUMENTS, ""]
    expected = [(f"a.parquet:{i + 1}", t) for i, t in enumerate(texts)]
    self.assertEqual(found, expected)

  def test_other_columns_and_types_are_named(self):
    self._write(["a"], "body")
    with self.assertRaisesRegex(
      ValueError, r"no column 'text', found \['id', 'body'\]"
    ):
      self._read("a.parquet")
    with self.assertRaisesRegex(ValueError, "row 1: 'id' is int, expected"):
      self._read("a.parquet", field="id")

  @parameterized.product(form=["file", "stream"], compression=[None, "zstd"])
  def test_a_damaged_batch_of_arrow_is_left_out_alone(self, form, compression):
    import pyarrow
    from pyarrow import ipc

    texts = [f"{i * i} {i}" * 20 for i in range(50)]
    batches = [
      pyarrow.record_batch({"text": texts[i : i + 10]})
      for i in range(0, 50, 10)
    ]
    opened = ipc.new_file if form == "file" else ipc.new_stream
    options = ipc.IpcWriteOptions(compression=compression)
    sink, starts = pyarrow.BufferOutputStream(), []
    with opened(sink, batches[0].schema, options=options) as writer:
      for batch in batches:
        starts.append(sink.tell())
        writer.write_batch(batch)
    content = bytearray(sink.getvalue().to_pybytes())
    # The offsets of texts lie before these, where they are not compressed.
    at = starts[3] - 60 if compression else content.index(texts[20].encode())
    content[at - 40 : at - 10] = b"\7" * 30
    found, left_out = self._skip("a.arrow", bytes(content))
    self.assertEqual([t for _, t in found], texts[:20] + texts[30:])
    self.assertEqual(left_out, [("a.arrow:21", "damaged or truncated")])
    with self.assertRaisesRegex(ValueError, "a.arrow, row 21 or after: dam"):
      self._read("a.arrow")


class PiecesTest(FolderTest):
  def _write(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)

  def _list(self, *globs, piece_bytes=1000):
    return text_pieces.list_pieces(
      [str(self.root / g) for g in globs], piece_bytes
    )

  @parameterized.parameters(1, 10, 37, 38, 100, 10**6)
  def test_lines_are_never_cut(self, piece_bytes):
    lines = [
      json.dumps({"text": "x" * (i % 7)}).encode() + b"\n" for i in range(40)
    ]
    content = b"".join(lines)[:-1]  # the last line may have no end
    self._write("a.jsonl", content)
    pieces = [p for g in self._list("*", piece_bytes=piece_bytes) for p in g]
    parts = [content[piece.start : piece.stop] for piece in pieces]
    self.assertEqual(b"".join(parts), content)
    for part, piece in zip(parts, pieces):
      self.assertTrue(part.endswith(b"\n") or piece is pieces[-1])
      self.assertEqual(piece.first, content[: piece.start].count(b"\n") + 1)
      self.assertEqual(piece.size, len(part))
      self.assertLess(len(part), piece_bytes + max(map(len, lines)))
    if piece_bytes == 1:
      self.assertLen(pieces, 40)

  def test_plan_is_the_same_elsewhere_and_in_any_order(self):
    for name in ("x/a.txt", "x/b.jsonl"):
      self._write(name, b"{}\n" * 1000)
    plan = self._list("x/*")
    again = self._list("x/b.*", "x/a.txt", "x/*")
    self.assertEqual(again, plan)
    shutil.move(self.root / "x", self.root / "y")
    moved = self._list("y/*")
    same = text_pieces.fingerprint(plan)
    self.assertEqual(text_pieces.fingerprint(moved), same)
    self._write("y/a.txt", b"longer now")
    changed = text_pieces.fingerprint(self._list("y/*"))
    self.assertNotEqual(changed, same)
    cut = text_pieces.fingerprint(self._list("y/*", piece_bytes=500))
    self.assertLen({same, changed, cut}, 3)

  def test_missing_input_is_named(self):
    os.mkdir(self.root / "folder")
    with self.assertRaisesRegex(FileNotFoundError, "no.txt: no such file$"):
      self._list("no.txt")
    with self.assertRaisesRegex(FileNotFoundError, r"folder.*DIR/\*\*/\*"):
      self._list("folder")
    with self.assertRaisesRegex(FileNotFoundError, "no input"):
      self._list()
    with self.assertRaisesRegex(ValueError, "piece_bytes=0 must be"):
      self._list("*", piece_bytes=0)

  def test_tables_are_cut_between_row_groups_with_pyarrow(self):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [str(i) * 20 for i in range(100)]})
    parquet.write_table(table, self.root / "a.parquet", row_group_size=15)
    for piece_bytes, expected in ((1, 7), (10**6, 1)):
      groups = self._list("*", piece_bytes=piece_bytes)
      pieces = list(itertools.chain(*groups))
      self.assertLen(pieces, expected)
      for a, b in itertools.pairwise(pieces):
        self.assertEqual(a.stop, b.start)
      self.assertEqual((pieces[0].start, pieces[-1].stop), (0, 7))
      firsts = [piece.first for piece in pieces]
      self.assertEqual(firsts, [1 + 15 * piece.start for piece in pieces])

  @parameterized.parameters(
    ("a.txt", ("text", "")),
    ("a", ("text", "")),
    ("a.py.gz", ("text", ".gz")),
    ("a.jsonl", ("jsonl", "")),
    ("A.JSONL.ZST", ("jsonl", ".zst")),
    ("c4-train.00000.json.gz", ("jsonl", ".gz")),
    ("a.parquet", ("parquet", "")),
  )
  def test_suffix_says_the_format(self, name, expected):
    self.assertEqual(text_pieces.file_format(name), expected)


if __name__ == "__main__":
  absltest.main()
