"""Sets of tokens: made of files of text, read at random, packed and mixed."""

import json
import pickle
from unittest import mock

import numpy as np
from absl.testing import parameterized

from moh_jax.config.data import TextDataConfig
from moh_jax.data import sequences, stdlib, tokenizers, tokens
from moh_jax.data.sequences import PackedSource
from moh_jax.data.tokenizers import BytesTokenizer, train_bpe
from moh_jax.data.tokens import BLOCK, TokenSet
from tests.data import tiny_text
from tests.folders import FolderTest


class DtypeTest(parameterized.TestCase):
  @parameterized.parameters((2, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4"))
  def test_holds_every_token(self, vocabulary, dtype):
    self.assertEqual(tokens.token_dtype(vocabulary), np.dtype(dtype))


class _FilesTest(FolderTest):
  """Files of lines, of which some are no JSON."""

  def setUp(self):
    super().setUp()
    self.good = []
    for number in range(20):
      texts = [f"document {10 * number + i} " + "é" * i for i in range(10)]
      self.good += texts
      rows = [json.dumps({"text": text}) for text in texts]
      if number % 5 == 2:
        rows.insert(3, "no JSON")
      self._write(f"in/{number:02d}.jsonl", "\n".join(rows))

  def _write(self, name, text):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  def _run(self, name, tokenizer=None, inputs="in/*", **options):
    if "held_out" not in options:
      options["split"] = "all"
    options = {"shard_bytes": 800, "on_error": "skip", **options}
    used = tokenizer or BytesTokenizer()
    return tokens.tokenize(
      [str(self.root / inputs)], used, self.root / name, **options
    )

  def _files(self, name):
    folder = self.root / name
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {x.relative_to(folder): hash(x.read_bytes()) for x in paths}

  def _texts(self, name, split="all"):
    return tiny_text.texts(self.root / name / split)


class MadeTest(_FilesTest):
  def test_killed_run_continues_to_the_same_bytes(self):
    used, encode = BytesTokenizer(), BytesTokenizer().encode_batch
    calls = [*[encode] * 4, mock.Mock(side_effect=KeyboardInterrupt)]
    used.encode_batch = lambda texts: calls.pop(0)(texts)
    with self.assertRaises(KeyboardInterrupt):
      self._run("killed", used, held_out=0.2)
    written = [*(self.root / "killed").glob("*/*.array_record")]
    times = [path.stat().st_mtime_ns for path in written]
    self.assertLen(written, 8)
    found = self._run("killed", held_out=0.2)
    self._run("whole", held_out=0.2)
    self.assertEqual(self._files("killed"), self._files("whole"))
    self.assertEqual([path.stat().st_mtime_ns for path in written], times)
    texts = [self._texts("killed", x) for x in ("train", "val")]
    self.assertCountEqual(texts[0] + texts[1], self.good)
    self.assertTrue(all(texts))
    listed = "".join(
      (self.root / f"killed/{split}/skipped.txt").read_text()
      for split, metadata in found.items()
      if metadata["skipped"]
    )
    self.assertEqual(listed.count("not JSON"), 4)
    self.assertIn(f"{self.root}/in/02.jsonl:4: not JSON", listed)

  def test_other_input_or_options_are_refused(self):
    self._run("out")
    with self.assertRaisesRegex(ValueError, "field: 'body' here, 'text' there"):
      self._run("out", field="body")
    self._write("in/07.jsonl", '{"text": "another"}')
    with self.assertRaisesRegex(ValueError, "inputs: 'sha256"):
      self._run("out")


class SplitsTest(_FilesTest):
  def test_part_of_a_document_does_not_depend_on_names_or_other_files(self):
    parts = {}
    for name, inputs in (("one", "in/0*"), ("all", "moved/*")):
      self._run(name, inputs=inputs, held_out=0.3)
      for split in ("train", "val"):
        for text in self._texts(name, split):
          self.assertEqual(parts.setdefault(text, split), split)
      if name == "one":
        self.assertLen(parts, 100)
        (self.root / "in").rename(self.root / "moved")
    self.assertLen(parts, 200)

  @parameterized.parameters(
    ("a\nb\nc\nd\n", 0.25, "a\nb\nc\n", "d\n"),
    ("a\nbbbb\nc", 0.2, "a\n", "bbbb\nc"),
    ("aaaa\nbbbbbbb", 0.3, "aaaa\n", "bbbbbbb"),  # cut at a line all the same
    ("aaaaaaaaa\nb", 0.9, "aaaaaaaaa\n", "b"),
  )
  def test_last_lines_of_one_file_are_held_out(self, text, share, head, tail):
    self._write("one.txt", text)
    found = self._run("out", inputs="one.txt", held_out=share)
    for split, part in (("train", head), ("val", tail)):
      self.assertEqual(self._texts("out", split), [part])
      self.assertEqual(found[split]["text_bytes"], len(part))

  @parameterized.parameters((0.2, 36), (0.5, 90), (0.01, 2))
  def test_a_share_of_one_shard_is_exact(self, share, number):
    found = self._run("out", held_out=share, shard_bytes=1 << 20)
    held, all_texts = self._texts("out", "val"), self._texts("out", "train")
    size = found["val"]["text_bytes"]
    wanted = share * (size + found["train"]["text_bytes"])
    self.assertBetween(len(held), 0.8 * number, 1.3 * number)
    self.assertLess(abs(size - wanted), 16)  # half a document
    self.assertCountEqual(held + all_texts, self.good)

  def test_of_few_files_the_last_lines_of_one_complete_the_share(self):
    lines = [f"line {i:03d}\n" for i in range(100)]
    for name, part in (("a", lines[:40]), ("b", lines[40:])):
      self._write(f"few/{name}.txt", "".join(part))
    found = self._run("out", inputs="few/*", held_out=0.2, shard_bytes=2000)
    self.assertBetween(found["val"]["text_bytes"], 180, 198)  # of 900
    texts = self._texts("out", "train") + self._texts("out", "val")
    self.assertLen(texts, 3)
    self.assertCountEqual("".join(texts).splitlines(True), lines)

  @parameterized.parameters((0.1, "val"), (0.9, "train"))
  def test_a_part_without_documents_is_named(self, share, part):
    self._write("one.txt", "one line")
    message = f"out/{part}: the input is too small to fill it"
    with self.assertRaisesRegex(ValueError, message):
      self._run("out", inputs="one.txt", held_out=share)

  def test_one_of_several_documents_is_held_out_at_least(self):
    self._run("out", inputs="in/00.jsonl", held_out=1e-9, shard_bytes=1 << 20)
    self.assertLen(self._texts("out", "val"), 1)
    self.assertLen(self._texts("out", "train"), 9)


_PARTS = {
  "train": ("abc.py", "collections/abc.py", "my/json/a.py"),
  "val": ("asyncio/tasks.py", "email/message.py", "json/decoder.py"),
}
_LEFT_OUT = ("email/__pycache__/x.py", "idlelib/idle_test/a.py", "data.txt")


class StdlibTest(FolderTest):
  def test_files_are_documents_of_their_part(self):
    library, out = self.root / "lib", self.root / "out"
    files = dict.fromkeys(_LEFT_OUT, b"x") | {"bad.py": b"\xff", "no.py": b""}
    for name in _PARTS["train"] + _PARTS["val"]:
      files[name] = (f"import {name}  # é\r\n" * 30).encode()
    for name, content in files.items():
      (library / name).parent.mkdir(parents=True, exist_ok=True)
      (library / name).write_bytes(content)
    for tokenizer, name in (("bytes", "bytes"), ("bpe", "bpe300")):
      with mock.patch("sysconfig.get_path", return_value=str(library)):
        folder = stdlib.prepare(out, tokenizer, 300)
      self.assertEqual(folder, out / name)
      for split, names in _PARTS.items():
        texts = [text.encode() for text in tiny_text.texts(folder / split)]
        self.assertEqual(texts, [files[name] for name in names])
    with mock.patch.object(stdlib, "tokenize") as made:  # nothing is made again
      stdlib.prepare(out, "bytes", 257)
    made.assert_not_called()


class ReadTest(FolderTest):
  def test_any_range_comes_back(self):
    # Shards of about 2.4 blocks, one of a single short block, one of none.
    documents = tiny_text.random_documents(3, 200, 200)
    documents[1:1] = [[[7, 8]], []]
    tiny_text.write(self.root, documents)
    row, ends = tiny_text.row(documents)
    content = pickle.dumps(TokenSet(self.root))
    self.assertLess(len(content), ends.nbytes / 10)
    token_set = pickle.loads(content)
    self.assertEqual(token_set.num_tokens, len(row))
    np.testing.assert_array_equal(token_set.ends, ends)
    borders = [*range(0, len(row), BLOCK), 0, ends[200], ends[201], len(row)]
    near = {b + d for b in borders for d in (-1, 0, 1)}
    near = sorted(b for b in near if 0 <= b <= len(row))
    for start in near:
      for stop in (b for b in near if b >= start):
        found = token_set.tokens(start, stop)
        np.testing.assert_array_equal(found, row[start:stop])
        self.assertEqual(found.dtype, np.int32)

  def test_tokenizer_comes_with_the_set(self):
    content = train_bpe(iter(["some text"]), 260)
    files = {tokenizers.GENERATION_CONFIG: b'{"eos_token_id": 1}'}
    used = tokenizers.JsonTokenizer(content, files)
    tiny_text.write(self.root, [[[5]]], used)
    found = TokenSet(self.root).tokenizer
    self.assertEqual((found.content, found.files), (content, files))
    path = self.root / "tokenizer.json"
    path.write_bytes(train_bpe(iter(["other"]), 260))
    with self.assertRaisesRegex(ValueError, "json: .* another tokenizer"):
      _ = TokenSet(self.root).tokenizer

  @parameterized.parameters(
    (None, 9, [9, 5, 9]), (8, None, [8, 5]), (8, 9, [8, 5, 9])
  )
  def test_end_stands_in_for_begin(self, bos_id, eos_id, expected):
    used = tiny_text.tokenizer(257, bos_id, eos_id)
    tiny_text.write(self.root, [[[5]]], used)
    found = TokenSet(self.root).tokens(0, len(expected))
    self.assertEqual(found.tolist(), expected)


_VOCAB = 300


class MixtureTest(parameterized.TestCase):
  @parameterized.parameters(
    ((70.0, 20.0, 10.0),), ((82.3, 4.6, 4.55, 4.5, 4.05),), ((0.01, 99.99),)
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


class SetsTest(FolderTest):
  def _write(self, name, seed=0, documents=40, used=None):
    for split in sequences.SPLITS:
      shards = tiny_text.random_documents(2, documents, 50, seed=seed)
      tiny_text.write(self.root / name / split, shards, used)

  def _data(self, **fields):
    defaults = {"source": "tokens", "path": str(self.root)}
    return TextDataConfig(**{**defaults, "sequence_length": 16, **fields})

  def test_few_held_out_sequences_are_warned_of(self):
    self._write("few", documents=2)
    self._write("many")
    with self.assertLogs(level="WARNING") as told:
      for mix, split in (("few", "val"), ("many", "val"), ("few", "train")):
        sequences.Text(self._data(mix=(mix,), ratios=(100.0,)), _VOCAB, split)
    (line,) = told.output
    self.assertRegex(line, r"only \d+ sequences are held out, few for")

  def test_missing_sources_and_other_tokenizers_are_named(self):
    self._write("a")
    content = tokenizers.train_bpe(iter(["text"]), 260)
    self._write("b", used=tokenizers.JsonTokenizer(content))
    for mix, split, message in (
      (("a", "nope"), "train", "nope/train: no such dir"),
      ((), "train", "train: no such directory"),
      (("a", "b"), "train", "b/train: made with another .*a/train"),
      (("a", "b"), "val", "b/val: made with .*a/val"),
    ):
      data = self._data(mix=mix, ratios=(50.0, 50.0)[: len(mix)])
      with self.assertRaisesRegex((FileNotFoundError, ValueError), message):
        sequences.Text(data, _VOCAB, split)

  def test_all_sources_follow_one_another(self):
    self._write("a", 1)
    self._write("b", 2, 10)
    data = self._data(mix=("a", "b"), ratios=(75.0, 25.0))
    held_out = sequences.Text(data, _VOCAB, "val")
    rows = []
    for name, seed, count in (("a", 1, 40), ("b", 2, 10)):
      one = self._data(mix=(name,), ratios=(100.0,))
      alone = sequences.Text(one, _VOCAB, "val")
      rows += [alone[i] for i in range(len(alone))]
      documents = tiny_text.random_documents(2, count, 50, seed=seed)
      row, _ = tiny_text.row(documents)
      weights = sum(alone[i]["weights"].sum() for i in range(len(alone)))
      self.assertEqual(weights, len(row) - 2 * count)
      size = sum(2 * len(ids) for shard in documents for ids in shard)
      self.assertEqual(alone.bytes_of(np.arange(len(alone))), size)
    self.assertLen(held_out, len(rows))
    for i, row in enumerate(rows):
      np.testing.assert_equal(dict(held_out[i]), dict(row))


def _token_by_token(row, ends, start, length, separate):
  """A sequence, slowly."""
  names = ("inputs", "targets", "segments", "positions", "weights")
  result = {name: np.zeros(length, np.int32) for name in names}
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
  @parameterized.product(
    length=(1, 16, 100, 5000), separate=(True, False), longest=(3, 300)
  )
  def test_equals_packing_token_by_token(self, length, separate, longest):
    documents = tiny_text.random_documents(2, 30, longest)
    tiny_text.write(self.root, documents)
    row, ends = tiny_text.row(documents)
    source = PackedSource(TokenSet(self.root), length, separate, keep_rest=True)
    self.assertLen(source, -(-(len(row) - 1) // length))
    ends = set(ends.tolist())
    for index in range(0, len(source), 1 if length > 1 else 50):
      start = index * length
      expected = _token_by_token(row, ends, start, length, separate)
      found = source[index]
      self.assertCountEqual(found, expected)
      for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)
