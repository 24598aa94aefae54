"""Sets of shards: written, continued, damaged; sequences packed from them."""

import concurrent.futures
import dataclasses
import pickle
import resource

import numpy as np
from absl.testing import parameterized

from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import MissingSplitError
from moh_jax.data import (
  identity,
  sequences,
  shards,
  token_sets,
  tokenizers,
)
from moh_jax.data.sequences import PackedSource
from moh_jax.data.shards import ShardWriter
from moh_jax.data.token_sets import BLOCK, DOCUMENTS, TokenSet
from moh_jax.data.tokenizers import train_bpe
from tests.data import tiny_text
from tests.folders import FolderTest

_SHARD = "00001-of-00003.array_record"


class _SetTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.folder = self.root / "set"

  def _writer(self, num_shards=3, **settings):
    settings = {"size": 8, **settings}
    return ShardWriter(self.folder, "images", num_shards, settings)

  def _fill(self, writer, only=None, first=0):
    for shard in writer.todo() if only is None else only:
      with writer.open(shard) as target:
        for item in range(4 * shard, min(4 * shard + 4, 10)):
          target.add({"label": item + first}, f"item {item}\n".encode())
    return writer

  def _whole(self, **options):
    return self._fill(self._writer(), **options).finish()

  def _files(self):
    paths = sorted(path for path in self.folder.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in paths}

  def _labels(self):
    read = shards.Shards(self.folder, "images")
    return [read[i][0]["label"] for i in range(len(read))]


class ReadTest(_SetTest):
  def test_damaged_record_is_named(self):
    self._whole()
    path = self.folder / _SHARD
    content = path.read_bytes()
    self.assertEqual(content.count(b"item 6\n"), 1)
    path.write_bytes(content.replace(b"item 6\n", b"item 9\n"))
    read = shards.Shards(self.folder, "images")
    self.assertEqual(read[5][0], {"label": 5})
    with self.assertRaisesRegex(ValueError, rf"{_SHARD}\[2\]: damaged"):
      read[6]
    with self.assertRaises(IndexError):
      read[10]

  @parameterized.parameters(
    ("metadata.json", "{", "metadata.json: not valid JSON"),
    ("metadata.json", "{}", "metadata.json: has no entry 'format'"),
    ("metadata.json", '"latents"', "'latents' of version 2, expected 'images'"),
    ("metadata.json", "2", "'images' of version 1, expected"),
    (_SHARD, "x", f"{_SHARD}: missing, truncated or of another set"),
    (_SHARD, None, f"{_SHARD}: missing, truncated or of another set"),
  )
  def test_what_is_damaged_is_named(self, name, text, reason):
    self._whole()
    path = self.folder / name
    if text is None:
      path.unlink()
    elif " of version " in reason:  # in place of one word
      word = '"images"' if "latents" in reason else "2"
      text = text if word != "2" else "1"
      path.write_text(path.read_text().replace(word, text, 1))
    else:
      path.write_text(text)
    with self.assertRaisesRegex(ValueError, reason):
      shards.Shards(self.folder, "images")

  def test_set_that_is_written_anew_is_read_anew(self):
    self._whole()
    self.assertEqual(self._labels(), [*range(10)])
    for path in self._files():
      (self.folder / path).unlink()
    self._whole(first=1)
    self.assertEqual(self._labels(), [*range(1, 11)])

  def test_unfinished_and_absent_sets_are_told_apart(self):
    with self.assertRaisesRegex(MissingSplitError, "set: no such directory"):
      self._labels()
    self._fill(self._writer())
    with self.assertRaisesRegex(FileNotFoundError, "json: .* written last"):
      self._labels()


class WriteTest(_SetTest):
  def test_interrupted_set_continues_to_the_same_bytes(self):
    self._whole()
    whole = self._files()
    for path in whole:
      (self.folder / path).unlink()
    writer = self._fill(self._writer(), only=[1])
    with self.assertRaises(KeyboardInterrupt), writer.open(0) as target:
      target.add({"label": 0}, b"item 0\n")
      raise KeyboardInterrupt
    written = list(self.folder.glob("*.array_record"))
    self.assertEqual(written, [self.folder / _SHARD])
    kept = (self.folder / _SHARD).stat().st_mtime_ns
    again = self._writer()
    self.assertEqual(again.todo(), [0, 2])
    self._fill(again).finish()
    self.assertEqual(self._files(), whole)
    self.assertEqual((self.folder / _SHARD).stat().st_mtime_ns, kept)
    self.assertEmpty(self._writer().todo())

  def test_other_settings_are_named_and_refused(self):
    self._writer(size=9)  # wrote no shard
    self._fill(self._writer(), only=[0])
    for name, ours, theirs in (("size", 16, 8), ("num_shards", 5, 3)):
      message = f"{name}: {ours} here, {theirs} there"
      with self.assertRaisesRegex(ValueError, message):
        self._writer(**{name: ours})
    (self.folder / "parts/settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "size: 8 here, None there"):
      self._writer()

  def test_skipped_items_are_listed(self):
    writer = self._fill(self._writer(), only=[0])
    with writer.open(1) as target:  # an empty shard between others
      for item in range(4):
        target.skip(f"{item}: bad")
    with writer.open(2) as target:
      target.add({"label": 8}, b"item 8\n")
      target.skip("ant/9.jpg: not\nan image")
    # The notes outlive an interruption.
    metadata = self._writer().finish(packed_from="here")
    self.assertEqual((metadata["examples"], metadata["skipped"]), (5, 5))
    self.assertEqual(metadata["packed_from"], "here")
    listed = (self.folder / shards.SKIPPED).read_text().splitlines()
    self.assertEqual(listed[3:], ["3: bad", "ant/9.jpg: not an image"])
    self.assertEqual(self._labels(), [0, 1, 2, 3, 8])

  def test_full_disk_leaves_finished_shards_whole(self):
    writer = self._fill(self._writer(), only=[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    with (
      self.assertRaisesRegex(
        OSError, "File too large.*finished ones are whole"
      ),
      writer.open(1) as target,
    ):
      target.add({"label": 0}, bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = self._writer()
    self.assertEqual(again.todo(), [1, 2])
    self._fill(again).finish()
    self.assertLen(self._labels(), 10)


class TokensTest(_SetTest):
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
    content = train_bpe(iter(["some text"]), 260)
    tiny_text.write(self.folder, [[[5]]], tokenizers.JsonTokenizer(content))
    metadata = TokenSet(self.folder).metadata
    found = token_sets.set_tokenizer(self.folder, metadata)
    self.assertEqual(found.content, content)
    path = self.folder / "tokenizer.json"
    path.write_bytes(train_bpe(iter(["other"]), 260))
    with self.assertRaisesRegex(ValueError, "tokenizer.json has sha256"):
      token_sets.set_tokenizer(self.folder, metadata)

  def test_a_lost_list_of_documents_is_written_again(self):
    documents = tiny_text.random_documents(3, 50, 400)
    tiny_text.write(self.folder, documents)
    whole = self._files()
    (self.folder / DOCUMENTS).unlink()
    tiny_text.write(self.folder, documents)
    self.assertEqual(self._files(), whole)

  @parameterized.parameters(
    (None, 9, [9, 5, 9]), (8, None, [8, 5]), (8, 9, [8, 5, 9])
  )
  def test_end_stands_in_for_begin(self, bos_id, eos_id, expected):
    used = tiny_text.tokenizer(257, bos_id, eos_id)
    tiny_text.write(self.folder, [[[5]]], used)
    token_set = TokenSet(self.folder)
    tokens = token_set.tokens(0, token_set.num_tokens)
    self.assertEqual(tokens.tolist(), expected)

  def test_a_changed_identity_names_the_source(self):
    facts = {"examples": 3}
    found = identity.differences(
      {"a": facts, "b": facts}, {"b": {"examples": 2}, "c": {}}
    )
    told = ["data 'a' is new", "data 'b': examples 3 here, 2 there"]
    self.assertEqual(found, [*told, "data 'c' is gone"])


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
  def test_turns_follow_the_ratios(self, ratios):
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
  def test_shares_of_the_sources_are_those_of_their_turns(self):
    data = self._mixed()
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
