import itertools
import json
import os
import pathlib
import shutil
import tempfile

from absl.testing import absltest, parameterized

from moh_jax.data import text_files as text_pieces


class PiecesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _write(self, name, content):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)

  def _list(self, *globs, piece_bytes=1000):
    return text_pieces.list_pieces(
      [str(self.root / g) for g in globs], piece_bytes
    )

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

  def test_small_files_are_grouped_in_order(self):
    for name in ("b/2.txt", "a.txt", "b/1.txt", "c.jsonl"):
      self._write(name, bytes(400))
    groups = self._list("**/*")
    names = [[piece.name for piece in group] for group in groups]
    self.assertEqual(names, [["a.txt", "b/1.txt"], ["b/2.txt", "c.jsonl"]])

  def test_large_text_and_packed_files_stay_whole(self):
    for name in ("a.txt", "b.jsonl.gz"):
      self._write(name, b"\n" * 5000)
    groups = self._list("*")
    self.assertEqual([(p.start, p.stop) for (p,) in groups], [(0, 5000)] * 2)

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

  def test_names_with_brackets_are_taken_as_they_are(self):
    self._write("a[1].txt", b"text")
    ((piece,),) = self._list("a[1].txt")
    self.assertEqual(piece.name, "a[1].txt")

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

  def test_size_of_a_table_counts_with_pyarrow(self):
    import pyarrow
    from pyarrow import parquet

    found = set()
    for text in ("short", "a longer text"):
      table = pyarrow.table({"text": [text + str(i) for i in range(20)]})
      parquet.write_table(table, self.root / "a.parquet")
      found.add(text_pieces.fingerprint(self._list("*")))
    self.assertLen(found, 2)

  def test_damaged_table_is_named_with_pyarrow(self):
    self._write("a.parquet", b"PAR1 no table")
    with self.assertRaisesRegex(ValueError, "a.parquet: damaged or no Parquet"):
      self._list("*")


if __name__ == "__main__":
  absltest.main()
