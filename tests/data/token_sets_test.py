"""A set of shards that has changed is not the set of before."""

import concurrent.futures
import json
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data import identity, shards, token_sets, tokenizers
from moh_jax.data.token_sets import BLOCK, DOCUMENTS, TokenSet, TokenSetWriter
from tests.data import tiny_text


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


class IdentityTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.create_tempdir().full_path)
    self.folder, self.documents = root / "set", self._documents(4)
    tiny_text.write(self.folder, self.documents)
    self.before = {"text": TokenSet(self.folder).identity()}

  def _documents(self, shards, seed=0):
    return tiny_text.random_documents(shards, 6, 50, seed=seed)

  def _differences(self):
    now = {"text": TokenSet(self.folder).identity()}
    return " ".join(identity.differences(now, self.before))

  def test_other_sources_are_named(self):
    facts = {"examples": 3}
    found = identity.differences(
      {"a": facts, "b": facts}, {"b": facts, "c": {}}
    )
    self.assertEqual(found, ["data 'a' is new", "data 'c' is gone"])


if __name__ == "__main__":
  absltest.main()
