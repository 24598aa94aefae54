import dataclasses

import numpy as np
from absl.testing import parameterized

from moh_jax.config.data import TextDataConfig
from moh_jax.data import sequences, tokenizers
from moh_jax.data.sequences import PackedSource
from moh_jax.data.token_sets import TokenSet
from tests.data import tiny_text
from tests.data.folder import FolderTest

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


class _SetsTest(FolderTest):
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
  def test_sources_come_by_their_ratios_and_are_a_function_of_the_seed(self):
    data = self._mixed()
    one, again, other = (
      [stream[i]["inputs"].tobytes() for i in range(200)]
      for stream in (
        sequences.Text(data, _VOCAB, "train").stream(seed) for seed in (0, 0, 1)
      )
    )
    self.assertEqual(one, again)
    self.assertLess(sum(map(bytes.__eq__, one, other)), 50)
    for n in (4, 50, 333):
      a, b = sequences.Mixture(data.ratios).counts(n)
      shares = sequences.mixture_shares(data, n)
      self.assertEqual(shares, {"a": a / n, "b": b / n})


class RefusedTest(_SetsTest):
  def test_missing_sources_and_other_tokenizers_are_named(self):
    self._write("a")
    content = tokenizers.train_bpe(iter(["text"]), 260)
    self._write("b", used=tokenizers.JsonTokenizer(content))
    for mix, split, message in (
      (("a", "nope"), "train", "nope/train: no such dir"),
      ((), "train", "train: no such directory"),
      (("a", "b"), "train", "b/train: made with .* 'tokenizer_json' .*a/train"),
      (("a", "b"), "val", "b/val: made with .*a/val"),
    ):
      data = self._data(mix=mix, ratios=(50.0, 50.0)[: len(mix)])
      with self.assertRaisesRegex((FileNotFoundError, ValueError), message):
        sequences.Text(data, _VOCAB, split)


class HeldOutTest(_SetsTest):
  def test_all_sources_follow_one_another(self):
    data = self._mixed()
    held_out = sequences.Text(data, _VOCAB, "val")
    rows = []
    for name, seed, count in (("a", 1, 40), ("b", 2, 10)):
      alone = sequences.Text(
        dataclasses.replace(data, mix=(name,), ratios=(100.0,)), _VOCAB, "val"
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


_DTYPES = {
  "inputs": np.int32,
  "targets": np.int32,
  "segments": np.int32,
  "positions": np.int32,
  "weights": np.float32,
}


def _token_by_token(row, ends, start, length, separate):
  """A sequence, slowly."""
  result = {name: np.zeros(length, dtype) for name, dtype in _DTYPES.items()}
  segment, position = 0, 0
  for i in range(length):
    at = start + i
    if at + 1 >= len(row):
      break
    if i == 0 or (separate and at in ends):
      segment, position = segment + 1, 0
    result["inputs"][i], result["targets"][i] = row[at], row[at + 1]
    result["segments"][i], result["positions"][i] = segment, position
    result["weights"][i] = not (separate and at + 1 in ends)
    position += 1
  return result


class PackedSourceTest(FolderTest):
  def _set(self, documents):
    tiny_text.write(self.root / "set", documents)
    return TokenSet(self.root / "set"), *tiny_text.row(documents)

  @parameterized.product(
    length=(1, 16, 100, 5000), separate=(True, False), longest=(3, 300)
  )
  def test_equals_packing_token_by_token(self, length, separate, longest):
    documents = tiny_text.random_documents(2, 30, longest)
    token_set, row, ends = self._set(documents)
    source = PackedSource(token_set, length, separate, keep_rest=True)
    self.assertLen(source, -(-(len(row) - 1) // length))
    ends = set(ends.tolist())
    for index in range(0, len(source), 1 if length > 1 else 50):
      start = index * length
      expected = _token_by_token(row, ends, start, length, separate)
      found = source[index]
      self.assertCountEqual(found, expected)
      for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)
        self.assertEqual(found[name].dtype, values.dtype)
