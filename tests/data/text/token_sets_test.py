import concurrent.futures
import json
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data import shards, token_sets, tokenizers
from moh_jax.data.token_sets import BLOCK, TokenSet
from tests.data.text import tiny_text


class _SetTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root) / "set"

  def _tokenizer(self):
    token_set = TokenSet(self.folder)
    return token_sets.set_tokenizer(token_set.folder, token_set.metadata)

  def _change(self, **entries):
    path = self.folder / shards.METADATA
    metadata = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps(metadata))


class ReadTest(_SetTest):
  def test_any_range_comes_back(self):
    # Shards of about 2.4 blocks, one of a single short block, one of none.
    documents = tiny_text.random_documents(3, 200, 200)
    documents[1:1] = [[[7, 8]], []]
    tiny_text.write(self.folder, documents)
    row, ends = tiny_text.row(documents)
    token_set = TokenSet(self.folder)
    self.assertEqual(token_set.num_tokens, len(row))
    np.testing.assert_array_equal(token_set.ends, ends)
    borders = [*range(0, len(row), BLOCK), 0, ends[200], ends[201], len(row)]
    near = {b + d for b in borders for d in (-1, 0, 1)}
    near = sorted(b for b in near if 0 <= b <= len(row))
    for start in near:
      for stop in (b for b in near if b >= start):
        tokens = token_set.tokens(start, stop)
        np.testing.assert_array_equal(tokens, row[start:stop])
        self.assertEqual(tokens.dtype, np.int32)

  @parameterized.parameters(65536, 65537)
  def test_large_ids(self, vocab_size):
    used = tiny_text.tokenizer(vocab_size, None, 65535)
    tiny_text.write(self.folder, [[[1, vocab_size - 1]]], used)
    tokens = TokenSet(self.folder).tokens(0, 4)
    self.assertEqual(tokens.tolist(), [65535, 1, vocab_size - 1, 65535])

  def test_documents_without_begin_and_end(self):
    used = tiny_text.tokenizer(256, None, None)
    tiny_text.write(self.folder, [[[1, 2], [3]]], used)
    token_set = TokenSet(self.folder)
    self.assertEqual(token_set.tokens(0, 3).tolist(), [1, 2, 3])
    self.assertEqual(token_set.ends.tolist(), [0, 2, 3])

  def test_tokens_that_are_not_there(self):
    tiny_text.write(self.folder, [[[1, 2]]])
    token_set = TokenSet(self.folder)
    self.assertEqual(token_set.tokens(4, 4).tolist(), [])
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
      with self.assertRaises(IndexError):
        token_set.tokens(start, stop)

  def test_pickles_small_and_reads_in_threads(self):
    documents = tiny_text.random_documents(2, 9000, 3)
    tiny_text.write(self.folder, documents)
    row, ends = tiny_text.row(documents)
    token_set = TokenSet(self.folder)
    token_set.tokens(0, 10)
    content = pickle.dumps(token_set)
    self.assertLess(len(content), ends.nbytes / 10)
    token_set = pickle.loads(content)
    np.testing.assert_array_equal(token_set.ends, ends)
    starts = range(0, len(row) - 100, 97)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      found = pool.map(lambda s: token_set.tokens(s, s + 100), starts)
    for start, tokens in zip(starts, found):
      np.testing.assert_array_equal(tokens, row[start : start + 100])

  def test_tokenizer_comes_with_the_set(self):
    content = tokenizers.train_bpe(iter(["some text"]), 260)
    used = tokenizers.JsonTokenizer(content)
    tiny_text.write(self.folder, [[[5]]], used)
    self.assertEqual(self._tokenizer().content, content)
    path = self.folder / "tokenizer.json"
    path.write_bytes(tokenizers.train_bpe(iter(["other"]), 260))
    with self.assertRaisesRegex(ValueError, "tokenizer.json has sha256"):
      self._tokenizer()
    path.unlink()
    with self.assertRaisesRegex(FileNotFoundError, "tokenizer.json: no such"):
      self._tokenizer()

  def test_bytes_need_no_file(self):
    tiny_text.write(self.folder, [[[5]]])
    self.assertEqual(self._tokenizer().kind, "bytes")


class DamageTest(_SetTest):
  def test_id_beyond_the_vocabulary_names_shard_and_place(self):
    documents = [[[1] * 5], [[2] * BLOCK, [3, 4, 99, 5]]]
    tiny_text.write(self.folder, documents, tiny_text.tokenizer(257, 6, 6))
    self._change(vocab_size=99)
    token_set = TokenSet(self.folder)
    token_set.tokens(0, 7 + BLOCK)
    # In the shard: begin, BLOCK tokens, end, begin, 3, 4.
    with self.assertRaisesRegex(
      ValueError,
      f"00001-of-00002.array_record: token {BLOCK + 5} is 99, beyond "
      "vocab_size=99",
    ):
      token_set.tokens(BLOCK, BLOCK + 13)

  def test_missing_and_truncated_shards_are_named(self):
    tiny_text.write(self.folder, tiny_text.random_documents(3, 10, 10))
    path = self.folder / "00001-of-00003.array_record"
    path.write_bytes(path.read_bytes()[:500])
    with self.assertRaisesRegex(ValueError, "truncated .*: 00001-of-00003"):
      TokenSet(self.folder)
    path.unlink()
    with self.assertRaisesRegex(FileNotFoundError, "lacks 1 of its 3 shards"):
      TokenSet(self.folder)

  def test_damaged_block_is_named(self):
    tiny_text.write(self.folder, [[[1] * 100]])
    path = self.folder / "00000-of-00001.array_record"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\1\0\1\0", b"\2\0\1\0", 1))
    with self.assertRaisesRegex(
      ValueError, r"00000-of-00001.array_record\[0\]: damaged record"
    ):
      TokenSet(self.folder).tokens(0, 5)

  def test_block_of_another_size_is_named(self):
    tiny_text.write(self.folder, [[[1] * 100]])
    self._change(vocab_size=1 << 17)
    with self.assertRaisesRegex(ValueError, "block 0 has 204 bytes, expected"):
      TokenSet(self.folder).tokens(0, 5)

  def test_documents_that_do_not_fit_are_refused(self):
    tiny_text.write(self.folder, [[[1], [2]]])
    path = self.folder / token_sets.DOCUMENTS
    for wrong in ([0, 3], [0, 3, 7], [1, 3, 6], [0.0, 3.0, 6.0]):
      np.save(path, np.array(wrong))
      with self.assertRaisesRegex(ValueError, "documents.npy: not of the 2"):
        TokenSet(self.folder)
    path.write_bytes(b"nothing")
    with self.assertRaisesRegex(ValueError, "documents.npy: damaged"):
      TokenSet(self.folder)
    path.unlink()
    with self.assertRaisesRegex(FileNotFoundError, "documents.npy: no such"):
      TokenSet(self.folder)

  def test_images_are_no_tokens(self):
    tiny_text.write(self.folder, [[[1], [2]]])
    self._change(format="images")
    with self.assertRaisesRegex(ValueError, "'images' of version 1, expected"):
      TokenSet(self.folder)


if __name__ == "__main__":
  absltest.main()
