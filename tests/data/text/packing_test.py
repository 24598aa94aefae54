import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data.sequences import FakeSequences, PackedSource
from moh_jax.data.token_sets import BLOCK, TokenSet
from tests.data.text import tiny_text

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


class PackedSourceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

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

  def test_every_token_but_a_documents_first_is_a_target_once(self):
    documents = tiny_text.random_documents(3, 100, 200)
    token_set, row, ends = self._set(documents)
    self.assertGreater(len(row), 3 * BLOCK)
    source = PackedSource(token_set, 64, keep_rest=True)
    weights = np.concatenate([source[i]["weights"] for i in range(len(source))])
    targets = np.concatenate([source[i]["targets"] for i in range(len(source))])
    expected = np.ones(len(row))
    expected[ends[:-1]] = 0
    np.testing.assert_array_equal(weights[: len(row) - 1], expected[1:])
    np.testing.assert_array_equal(targets[: len(row) - 1], row[1:])
    self.assertEqual(weights[len(row) - 1 :].sum(), 0)
    self.assertEqual(weights.sum(), len(row) - 300)

  def test_without_separation_all_but_padding_counts(self):
    documents = tiny_text.random_documents(1, 20, 30)
    token_set, row, _ = self._set(documents)
    source = PackedSource(token_set, 64, False, keep_rest=True)
    weights = np.concatenate([source[i]["weights"] for i in range(len(source))])
    self.assertEqual(weights.sum(), len(row) - 1)
    np.testing.assert_array_equal(source[0]["positions"], np.arange(64))
    np.testing.assert_array_equal(source[0]["segments"], 1)

  def test_training_gives_whole_sequences_alone(self):
    # 16 tokens with begin and end: 15 targets.
    token_set, *_ = self._set([[[1] * 14]])
    for length, whole, all_ in ((5, 3, 3), (4, 3, 4), (15, 1, 1), (16, 0, 1)):
      self.assertLen(PackedSource(token_set, length), whole)
      source = PackedSource(token_set, length, keep_rest=True)
      self.assertLen(source, all_)

  def test_sequences_that_are_not_there(self):
    token_set, *_ = self._set([[[1] * 14]])
    source = PackedSource(token_set, 5)
    for index in (-1, 3):
      with self.assertRaises(IndexError):
        source[index]


class FakeSequencesTest(absltest.TestCase):
  def test_is_a_function_of_the_index(self):
    a, b = (FakeSequences(50, 64, 20) for _ in range(2))
    other = FakeSequences(50, 64, 20, seed=1)
    for index in (3, 0, 3):
      for name, values in a[index].items():
        np.testing.assert_array_equal(values, b[index][name])
        self.assertEqual((values.shape, values.dtype), ((64,), _DTYPES[name]))
    self.assertFalse(np.array_equal(a[3]["inputs"], a[4]["inputs"]))
    self.assertFalse(np.array_equal(a[3]["inputs"], other[3]["inputs"]))

  def test_documents_begin_within_sequences(self):
    sequences = [FakeSequences(50, 64, 40)[i] for i in range(40)]
    segments = [s["segments"][-1] for s in sequences]
    self.assertBetween(np.mean(segments), 2, 6)
    for sequence in sequences:
      self.assertLess(sequence["targets"].max(), 50)
      borders = np.diff(sequence["segments"])
      np.testing.assert_array_equal(borders, 1 - sequence["weights"][:-1])
    joined = FakeSequences(50, 64, 40, separate=False)[0]
    self.assertEqual(joined["segments"].max(), 1)


if __name__ == "__main__":
  absltest.main()
