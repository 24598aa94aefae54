import json
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest

from moh_jax.data import shards
from moh_jax.data.token_sets import BLOCK, DOCUMENTS, TokenSet, TokenSetWriter
from tests.data.text import tiny_text


class TokenSetWriterTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / "set"

  def _writer(self, used=None, **settings):
    used = used or tiny_text.tokenizer()
    return TokenSetWriter(
      self.folder, used, num_shards=3, settings=settings, notes={}
    )

  def _files(self):
    return {p.name: p.read_bytes() for p in self.folder.iterdir()}

  def test_metadata_describes_the_set(self):
    documents = [[[1] * (BLOCK - 2)], [[1, 2], [3]]]
    tiny_text.write(self.folder, documents, gzip_bytes=5)
    metadata = json.loads((self.folder / shards.METADATA).read_text())
    for entry in metadata["shards"]:
      self.assertGreater(entry.pop("bytes"), 0)
      self.assertLen(entry.pop("xxh3"), 32)
    sha256 = tiny_text.tokenizer().sha256
    self.assertEqual(
      metadata,
      {
        "format": "tokens",
        "version": 1,
        "tokenizer": {"kind": "bytes", "sha256": sha256, "file": ""},
        "vocab_size": 257,
        "bos_id": 256,
        "eos_id": 256,
        "block": BLOCK,
        "items": 2,
        "shard_size": 1,
        "documents": 3,
        "tokens": BLOCK + 7,
        "text_bytes": 2 * (BLOCK + 1),
        "notes": {"gzip_bytes": 5},
        "examples": 4,
        "skipped": 0,
        "shards": [
          {
            "file": "00000-of-00002.array_record",
            "examples": 2,
            "documents": 1,
            "tokens": BLOCK,
            "text_bytes": 2 * (BLOCK - 2),
            "skipped": {},
          },
          {
            "file": "00001-of-00002.array_record",
            "examples": 2,
            "documents": 2,
            "tokens": 7,
            "text_bytes": 6,
            "skipped": {},
          },
        ],
      },
    )

  def test_documents_survive_a_kill_and_a_lost_file(self):
    documents = tiny_text.random_documents(3, 50, 400)
    tiny_text.write(self.folder, documents)
    whole = self._files()
    for path in self.folder.iterdir():
      path.unlink()
    writer = self._writer()
    with writer.open(1) as target:
      for ids in documents[1]:
        target.add(ids, 2 * len(ids))
    with self.assertRaises(KeyboardInterrupt), writer.open(0) as target:
      target.add(documents[0][0], 2)
      raise KeyboardInterrupt
    self.assertEqual(self._writer().todo(), [0, 2])
    tiny_text.write(self.folder, documents)
    self.assertEqual(self._files(), whole)
    (self.folder / DOCUMENTS).unlink()
    tiny_text.write(self.folder, documents)
    self.assertEqual(self._files(), whole)

  def test_a_damaged_shard_alone_is_written_again(self):
    documents = tiny_text.random_documents(3, 50, 400)
    tiny_text.write(self.folder, documents)
    whole = self._files()
    (self.folder / "00002-of-00003.array_record").write_bytes(b"")
    self.assertEqual(self._writer().todo(), [2])
    tiny_text.write(self.folder, documents)
    self.assertEqual(self._files(), whole)

  def test_other_tokenizer_or_settings_are_refused(self):
    self._writer(field="text")
    with self.assertRaisesRegex(ValueError, "vocab_size: 300 here, 257 there"):
      self._writer(tiny_text.tokenizer(300), field="text")
    with self.assertRaisesRegex(ValueError, "field: 'b' here, 'text' there"):
      self._writer(field="b")

  def test_end_stands_in_for_begin(self):
    for used, expected in (
      (tiny_text.tokenizer(257, None, 9), [9, 5, 9]),
      (tiny_text.tokenizer(257, 8, None), [8, 5]),
      (tiny_text.tokenizer(257, 8, 9), [8, 5, 9]),
    ):
      self.folder = self.folder.with_name(f"{used.bos_id} {used.eos_id}")
      tiny_text.write(self.folder, [[[5]]], used)
      token_set = TokenSet(self.folder)
      tokens = token_set.tokens(0, token_set.num_tokens)
      self.assertEqual(tokens.tolist(), expected)

  def test_pickles(self):
    writer = pickle.loads(pickle.dumps(self._writer()))
    with writer.open(2) as target:
      target.add([1], 1)
    self.assertEqual(self._writer().todo(), [0, 1])

  def test_a_set_without_documents_is_refused(self):
    with self.assertRaisesRegex(ValueError, "the input has no document for it"):
      tiny_text.write(self.folder, [[], []])

  def test_long_document(self):
    ids = np.arange(5 * BLOCK + 3) % 256
    tiny_text.write(self.folder, [[[1], ids.tolist(), [2]]])
    tokens = TokenSet(self.folder).tokens(4, 4 + len(ids))
    np.testing.assert_array_equal(tokens, ids)


if __name__ == "__main__":
  absltest.main()
