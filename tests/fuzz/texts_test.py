"""Files of text: JSON lines, packed files, tables, prompts."""

import gzip
import io
import json

import pyarrow
import pyarrow.feather
import pyarrow.parquet
from absl.testing import absltest
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.data import input_files, text_files
from tests.fuzz import hostile

_ROWS = [{"text": "a house", "n": 1}, {"text": "é" * 40}, {"text": None}]
_LINES = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()


def _table(write) -> bytes:
  file = io.BytesIO()
  write(pyarrow.table({"text": [row["text"] for row in _ROWS] * 20}), file)
  return file.getvalue()


_FILES = {
  "x.jsonl": _LINES,
  "x.txt": b"plain text\n",
  "x.jsonl.gz": gzip.compress(_LINES),
  "x.txt.gz": gzip.compress(b"plain text" * 50),
  "x.jsonl.zst": pyarrow.compress(_LINES, "zstd", asbytes=True),
  "x.parquet": _table(pyarrow.parquet.write_table),
  "x.arrow": _table(pyarrow.feather.write_feather),
}


class TextsTest(hostile.ReaderTest):
  def _read(self, file):
    for group in text_files.list_pieces([str(file)], 1 << 20):
      for piece in group:
        for _, text in text_files.read_documents(piece, "text"):
          text.encode()

  @hostile.examples(120)
  @given(st.sampled_from(sorted(_FILES)), st.data())
  def test_damaged_file(self, name, data):
    file = self.folder / name
    file.write_bytes(data.draw(hostile.damaged(_FILES[name])))
    self.check(self._read, file)
    self.check(text_files.Prompts, str(file))

  @hostile.examples()
  @given(st.data())
  def test_lines_of_other_values(self, data):
    file = self.folder / "rows.jsonl"
    rows = data.draw(st.lists(hostile.altered(_ROWS[0]), max_size=3))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    self.check(self._read, file)

  @hostile.examples()
  @given(st.data())
  def test_saved_data_set(self, data):
    folder = self.folder / "saved"
    folder.mkdir(exist_ok=True)
    (folder / "data.arrow").write_bytes(_FILES["x.arrow"])
    state = {"_data_files": [{"filename": "data.arrow"}], "_split": None}
    (folder / "state.json").write_bytes(data.draw(hostile.json_files(state)))
    self.check(input_files.list_files, [str(folder)])

  def test_document_that_unpacks_to_more_than_allowed(self):
    file = self.folder / "bomb.txt.gz"
    with gzip.open(file, "wb", compresslevel=1) as stream:
      for _ in range(9):
        stream.write(b"a" * (1 << 24))
    with self.assertRaisesRegex(ValueError, "bomb.txt.gz: too long"):
      self._read(file)


if __name__ == "__main__":
  absltest.main()
