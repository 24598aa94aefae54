import collections
import dataclasses
import pathlib
import pickle
import tempfile
from unittest import mock

import grain
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.data import TextDataConfig
from moh_jax.data.text import sequences, tokenizers
from tests.data.text import tiny_text

_VOCAB = 300


def _equal(a, b):
  np.testing.assert_equal(dict(a), dict(b))


class MixtureTest(parameterized.TestCase):
  @parameterized.parameters(
    ((50.0, 50.0),),
    ((70.0, 20.0, 10.0),),
    ((82.3, 4.6, 4.55, 4.5, 4.05),),
    ((0.01, 99.99),),
    ((33.3, 33.3, 33.4),),
  )
  def test_turns_follow_the_ratios(self, *ratios):
    (ratios,) = ratios
    mixture = sequences.Mixture(ratios)
    seen = [0] * len(ratios)
    for index in range(2000):
      source, position = mixture[index]
      self.assertEqual(position, seen[source])
      seen[source] += 1
      self.assertEqual(mixture.counts(index + 1), seen)
      for count, ratio in zip(seen, ratios):
        share = (index + 1) * ratio / sum(ratios)
        self.assertLess(abs(count - share), len(ratios))

  def test_shares_are_exact_in_the_long_run(self):
    ratios = (82.3, 4.6, 4.55, 4.5, 4.05)
    counts = sequences.Mixture(ratios).counts(10**12)
    for count, ratio in zip(counts, ratios):
      self.assertAlmostEqual(count / 1e10, ratio, places=8)

  def test_pickles(self):
    mixture = sequences.Mixture((60.0, 40.0))
    again = pickle.loads(pickle.dumps(mixture))
    self.assertEqual(
      [again[i] for i in range(50)], [mixture[i] for i in range(50)]
    )


class _SetsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _write(self, name, seed=0, documents=40, used=None, **notes):
    for split in sequences.SPLITS:
      shards = tiny_text.random_documents(2, documents, 50, seed=seed)
      tiny_text.write(self.root / name / split, shards, used, **notes)

  def _data(self, **fields):
    defaults = {"source": "tokens", "path": str(self.root)}
    defaults["sequence_length"] = 16
    return TextDataConfig(**{**defaults, **fields})

  def _mixed(self, **fields):
    self._write("a", 1)
    self._write("b", 2, 10)
    fields = {"mix": ("a", "b"), "ratios": (75.0, 25.0), **fields}
    return self._data(**fields)


class TrainTest(_SetsTest):
  def test_sources_come_by_their_ratios(self):
    data = self._mixed()
    stream = sequences.train_sequences(data, _VOCAB, seed=0)
    rows = {}
    for name, token_set in sequences.open_sets(data, _VOCAB, "train").items():
      tokens = token_set.tokens(0, token_set.num_tokens // 16 * 16)
      rows |= {row.tobytes(): name for row in tokens.reshape(-1, 16)}
    for n in (4, 50, 333):
      seen = collections.Counter(
        rows[stream[i]["inputs"].tobytes()] for i in range(n)
      )
      shares = sequences.mixture_shares(data, n)
      self.assertEqual(shares, {"a": seen["a"] / n, "b": seen["b"] / n})
    self.assertAlmostEqual(shares["a"], 0.75, delta=0.01)

  def test_element_is_a_function_of_seed_and_index(self):
    data = self._mixed()
    stream = sequences.train_sequences(data, _VOCAB, seed=3)
    elements = [stream[i] for i in range(200)]
    again = sequences.train_sequences(data, _VOCAB, seed=3)
    for i in np.random.default_rng(0).permutation(200):
      _equal(again[int(i)], elements[i])
    other = sequences.train_sequences(data, _VOCAB, seed=4)
    same = sum(
      np.array_equal(other[i]["inputs"], elements[i]["inputs"])
      for i in range(200)
    )
    self.assertLess(same, 50)

  def test_threads_give_the_same_order(self):
    data = self._mixed()
    stream = sequences.train_sequences(data, _VOCAB, seed=3)
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
    batches = iter(stream.to_iter_dataset(options).batch(8))
    for k in range(10):
      batch = next(batches)
      self.assertEqual(batch["inputs"].shape, (8, 16))
      for row in range(8):
        expected = stream[k * 8 + row]
        _equal({name: v[row] for name, v in batch.items()}, expected)

  def test_an_epoch_has_every_sequence_once_in_another_order(self):
    self._write("")
    stream = sequences.train_sequences(self._data(), _VOCAB, seed=0)
    source = sequences.open_sets(self._data(), _VOCAB, "train")["tokens"]
    size = (source.num_tokens - 1) // 16
    epochs = [
      [stream[i]["inputs"].tobytes() for i in range(size * e, size * (e + 1))]
      for e in range(2)
    ]
    tokens = source.tokens(0, size * 16).reshape(size, 16)
    self.assertCountEqual(epochs[0], [row.tobytes() for row in tokens])
    self.assertCountEqual(epochs[0], epochs[1])
    self.assertNotEqual(epochs[0], epochs[1])

  def test_one_source_alone(self):
    self._write("")
    data = self._data()
    element = sequences.train_sequences(data, _VOCAB, seed=0)[5]
    names = ("inputs", "targets", "segments", "positions", "weights")
    self.assertCountEqual(element, names)
    self.assertEqual(sequences.source_names(data), ("tokens",))
    self.assertEqual(sequences.mixture_shares(data, 7), {"tokens": 1.0})
    self.assertEqual(sequences.mixture_shares(data, 0), {"tokens": 0.0})

  def test_documents_may_be_one_text(self):
    self._write("")
    data = self._data(separate_documents=False)
    element = sequences.train_sequences(data, _VOCAB, seed=0)[5]
    np.testing.assert_array_equal(element["positions"], np.arange(16))

  def test_fake_needs_no_files(self):
    data = TextDataConfig(sequence_length=16, fake_examples=10)
    stream = sequences.train_sequences(data, 50, seed=0)
    first = [stream[i]["inputs"].tobytes() for i in range(10)]
    self.assertLen(set(first), 10)
    self.assertEqual(sequences.open_tokenizer(data, 50), None)
    self.assertLess(max(stream[i]["targets"].max() for i in range(10)), 50)


class OpenTest(_SetsTest):
  def test_tokenizer_needs_no_shard(self):
    used = tokenizers.JsonTokenizer(tokenizers.train_bpe(iter(["text"]), 260))
    self._write("", used=used)
    for path in self.root.rglob("*.array_record"):
      path.unlink()
    for split in sequences.SPLITS:
      found = sequences.open_tokenizer(self._data(), _VOCAB, split)
      self.assertEqual(found.sha256, used.sha256)
    with self.assertRaisesRegex(FileNotFoundError, "lacks 2 of its 2 shards"):
      sequences.open_sets(self._data(), _VOCAB, "train")

  def test_a_run_opens_every_set_once(self):
    data = self._mixed()
    with mock.patch.object(
      sequences, "TokenSet", side_effect=sequences.TokenSet
    ) as opened:
      sequences.train_sequences(data, _VOCAB, 0)
      sequences.HeldOut(data, _VOCAB)
      for split in sequences.SPLITS:
        sequences.open_tokenizer(data, _VOCAB, split)
    folders = [call.args[0] for call in opened.call_args_list]
    self.assertCountEqual(
      folders,
      [self.root / name / s for name in "ab" for s in sequences.SPLITS],
    )


class RefusedTest(_SetsTest):
  def test_missing_source_is_named(self):
    self._write("a")
    data = self._data(mix=("a", "nope"), ratios=(50.0, 50.0))
    with self.assertRaisesRegex(FileNotFoundError, "nope/train: no such dir"):
      sequences.train_sequences(data, _VOCAB, 0)
    with self.assertRaisesRegex(FileNotFoundError, "train: no such directory"):
      sequences.train_sequences(self._data(), _VOCAB, 0)

  def test_other_tokenizers_are_named(self):
    self._write("a")
    content = tokenizers.train_bpe(iter(["text"]), 260)
    self._write("b", used=tokenizers.JsonTokenizer(content))
    data = self._data(mix=("a", "b"), ratios=(50.0, 50.0))
    with self.assertRaisesRegex(
      ValueError, "b/train: made with a tokenizer 'tokenizer_json' .*a/train"
    ):
      sequences.train_sequences(data, _VOCAB, 0)
    with self.assertRaisesRegex(ValueError, "b/val: made with .*a/val"):
      sequences.HeldOut(data, _VOCAB)

  def test_splits_of_other_tokenizers_are_named(self):
    used = tokenizers.JsonTokenizer(tokenizers.train_bpe(iter(["text"]), 260))
    tiny_text.write(self.root / "train", [[[1] * 50]])
    tiny_text.write(self.root / "val", [[[1] * 50]], used)
    for open_ in (
      lambda: sequences.HeldOut(self._data(), _VOCAB),
      lambda: sequences.train_sequences(self._data(), _VOCAB, 0),
    ):
      with self.assertRaisesRegex(ValueError, "their ids mean different text"):
        open_()

  def test_vocabulary_beyond_the_model_is_named(self):
    self._write("")
    with self.assertRaisesRegex(
      ValueError, "its tokenizer has 257 ids, more than model.vocab_size=256"
    ):
      sequences.train_sequences(self._data(), 256, 0)

  def test_too_few_tokens_are_named(self):
    self._write("", documents=1)
    with self.assertRaisesRegex(ValueError, "fewer than data.sequence_length"):
      sequences.train_sequences(self._data(sequence_length=999), _VOCAB, 0)

  def test_ratios_must_sum_to_100(self):
    with self.assertRaisesRegex(ValueError, "must sum to 100"):
      self._data(mix=("a", "b"), ratios=(50.0, 49.0))
    self._data(mix=("a", "b"), ratios=(50.0, 49.96))

  def test_unknown_split_is_refused(self):
    with self.assertRaisesRegex(ValueError, "split='test' must be one of"):
      sequences.open_sets(self._data(), _VOCAB, "test")


class HeldOutTest(_SetsTest):
  def test_all_sources_follow_one_another(self):
    data = self._mixed()
    held_out = sequences.HeldOut(data, _VOCAB)
    rows = []
    for name, seed, count in (("a", 1, 40), ("b", 2, 10)):
      alone = sequences.HeldOut(
        dataclasses.replace(data, mix=(name,), ratios=(100.0,)), _VOCAB
      )
      rows += [alone[i] for i in range(len(alone))]
      documents = tiny_text.random_documents(2, count, 50, seed=seed)
      row, _ = tiny_text.row(documents)
      weights = sum(alone[i]["weights"].sum() for i in range(len(alone)))
      self.assertEqual(weights, len(row) - 2 * count)
      size = sum(2 * len(ids) for shard in documents for ids in shard)
      self.assertEqual(alone.text_bytes, size)
    self.assertLen(held_out, len(rows))
    for i, row in enumerate(rows):
      _equal(held_out[i], row)
    for index in (-1, len(rows)):
      with self.assertRaises(IndexError):
        held_out[index]

  def test_notes_and_bytes_add_up(self):
    self._write("a", 1, gzip_bytes=10, xz_bytes=5, python="3.11")
    self._write("b", 2, gzip_bytes=20, python="3.11")
    one = self._data(mix=("a",), ratios=(100.0,))
    held_out = sequences.HeldOut(one, _VOCAB)
    notes = {"gzip_bytes": 10, "xz_bytes": 5, "python": "3.11"}
    self.assertEqual(held_out.notes, notes)
    both = self._data(mix=("a", "b"), ratios=(50.0, 50.0))
    total = sequences.HeldOut(both, _VOCAB)
    self.assertEqual(total.notes, {"gzip_bytes": 30})
    self.assertGreater(total.text_bytes, held_out.text_bytes)

  def test_fake_differs_from_training(self):
    data = TextDataConfig(sequence_length=16, fake_examples=10)
    held_out = sequences.HeldOut(data, 50)
    self.assertLen(held_out, 10)
    self.assertEqual((held_out.text_bytes, held_out.notes), (160, {}))
    stream = sequences.train_sequences(data, 50, 0)
    train = {stream[i]["inputs"].tobytes() for i in range(10)}
    val = {held_out[i]["inputs"].tobytes() for i in range(10)}
    self.assertEmpty(train & val)


if __name__ == "__main__":
  absltest.main()
