import io
import json
import pathlib
import pickle
import random
import sys
import tempfile
from unittest import mock

import tokenizers as hf
from absl.testing import absltest, parameterized

from moh_jax.data import tokenizers
from moh_jax.data.tokenizers import StreamDecoder

_TEXTS = (
  "Hello, world!",
  "  two  spaces\n\n\ttab \r\n",
  "Grüße aus Köln, 你好世界, привет",
  "👩‍👩‍👧‍👦 family 🇩🇪 flag 🤷🏽‍♀️",
  "a\x00b\x7f\u2028c",
  "<|end_of_text|> is text here, and so is <|begin_of_text|>",
)
_CORPUS = ["def head(x):\n  return x\n" * 20, "the heads of the layer " * 50]


def _bpe(vocab_size=300):
  content = tokenizers.train_bpe(iter(_CORPUS), vocab_size)
  return tokenizers.tokenizer_from_bytes("tokenizer_json", content)


def _words(*specials, **options):
  """A tokenizer.json that knows two words and some special tokens."""
  words = {"a": 0, "b": 1, "[UNK]": 2}
  tokenizer = hf.Tokenizer(hf.models.WordLevel(words, unk_token="[UNK]"))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(list(specials))
  for name, value in options.items():
    getattr(tokenizer, name)(value)
  content = tokenizer.to_str().encode()
  return tokenizers.tokenizer_from_bytes("tokenizer_json", content)


def _metaspace(scheme):
  """A tokenizer.json whose words begin with their space."""
  trained = hf.Tokenizer(hf.models.BPE())
  trained.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme)
  trained.decoder = hf.decoders.Metaspace(prepend_scheme=scheme)
  trained.train_from_iterator(_CORPUS, hf.trainers.BpeTrainer(vocab_size=60))
  trained.add_tokens(["<shown>", "[a] "])
  trained.add_special_tokens(["<s>", "</s>"])
  return tokenizers.JsonTokenizer(trained.to_str().encode())


def _sentencepiece(files=None, **options):
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(_CORPUS),
    model_writer=model,
    vocab_size=300,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
    **options,
  )
  content = model.getvalue()
  return tokenizers.tokenizer_from_bytes("sentencepiece", content, files or {})


class RoundTripTest(parameterized.TestCase):
  @parameterized.product(kind=("bpe", "bytes"), text=_TEXTS)
  def test_text_comes_back(self, kind, text):
    tokenizer = _bpe() if kind == "bpe" else tokenizers.BytesTokenizer()
    ids = tokenizer.encode(text)
    self.assertEqual(tokenizer.decode(ids), text)
    self.assertLess(max(ids), tokenizer.vocab_size)
    self.assertNoCommonElements(ids, [tokenizer.bos_id, tokenizer.eos_id])
    self.assertEqual(tokenizer.encode_batch([text, "x"])[0], ids)
    again = pickle.loads(pickle.dumps(tokenizer))
    self.assertEqual(again.encode(text), ids)
    self.assertEqual(again.sha256, tokenizer.sha256)

  @parameterized.product(kind=("bpe", "bytes"), text=_TEXTS)
  def test_stream_gives_whole_characters(self, kind, text):
    tokenizer = _bpe() if kind == "bpe" else tokenizers.BytesTokenizer()
    stream = StreamDecoder(tokenizer)
    parts = [stream.feed(token) for token in tokenizer.encode(text)]
    self.assertEqual("".join(parts), text)
    self.assertNotIn("\ufffd", "".join(parts))
    self.assertEqual(stream.flush(), "")

  def test_special_tokens_decode_to_nothing(self):
    for tokenizer in (_bpe(), tokenizers.BytesTokenizer()):
      a, b = tokenizer.encode("ab")
      ids = [tokenizer.bos_id, a, tokenizer.eos_id, b, 10**6]
      self.assertEqual(tokenizer.decode(ids), "ab")
      stream = StreamDecoder(tokenizer)
      self.assertEqual([stream.feed(i) for i in ids], ["", "a", "", "b", ""])


class StreamTest(parameterized.TestCase):
  @parameterized.parameters("always", "first", "never", "sentencepiece", "bpe")
  def test_stream_equals_decode_whatever_comes_before(self, kind):
    if kind == "sentencepiece":
      tokenizer = _sentencepiece()
    else:
      tokenizer = _bpe() if kind == "bpe" else _metaspace(kind)
    names = {i: tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)}
    # Not bytes, which need not be characters.
    ids = [i for i, name in names.items() if name and "<0x" not in name]
    spaces = [i for i in ids if not names[i].strip(" \u2581\u0120")]
    beside = spaces + [i for i in ids if names[i][0] in "<["]
    rng = random.Random(0)
    for _ in range(500):
      written = rng.choices(beside, k=6) + rng.choices(ids, k=2)
      rng.shuffle(written)
      for start in (0, rng.randint(0, 8)):
        before = tokenizer.decode(written[:start])
        stream = StreamDecoder(tokenizer, written[:start])
        parts = [stream.feed(token) for token in written[start:]]
        text = before + "".join(parts) + stream.flush()
        self.assertEqual(text, tokenizer.decode(written), written)

  def test_a_character_that_begins_before_is_not_lost(self):
    first, second = "é".encode()
    stream = StreamDecoder(tokenizers.BytesTokenizer(), [97, first])
    self.assertEqual(stream.feed(second), "é")

  def test_half_a_character_waits_and_is_marked_at_the_end(self):
    stream = StreamDecoder(tokenizers.BytesTokenizer())
    parts = [stream.feed(token) for token in "é🤷".encode()[:-1]]
    self.assertEqual(parts, ["", "é", "", "", ""])
    self.assertEqual(stream.flush(), "\ufffd")

  def test_bytes_that_are_no_text_do_not_wait_forever(self):
    stream = StreamDecoder(tokenizers.BytesTokenizer())
    parts = [stream.feed(0xFF) for _ in range(100)]
    self.assertGreater(len("".join(parts)), 80)
    self.assertEqual("".join(parts) + stream.flush(), "\ufffd" * 100)
    self.assertEqual(stream.feed(ord("a")), "a")

  def test_the_replacement_character_itself_is_text(self):
    tokenizer = tokenizers.BytesTokenizer()
    stream = StreamDecoder(tokenizer)
    text = "a\ufffd\ufffdb\ufffd"
    parts = [stream.feed(token) for token in tokenizer.encode(text)]
    self.assertEqual("".join(parts) + stream.flush(), text)


class TrainTest(absltest.TestCase):
  def test_vocabulary_is_as_large_as_asked(self):
    self.assertEqual(_bpe(280).vocab_size, 280)
    self.assertEqual(_bpe(258).vocab_size, 258)
    self.assertLess(_bpe(5000).vocab_size, 5000)  # the text has no more

  def test_training_repeats(self):
    self.assertEqual(_bpe().content, _bpe().content)

  def test_begin_and_end_come_first(self):
    self.assertEqual((_bpe().bos_id, _bpe().eos_id), (0, 1))

  def test_too_few_entries_are_refused(self):
    with self.assertRaisesRegex(ValueError, "vocab_size=257 must be at least"):
      tokenizers.train_bpe(iter(_CORPUS), 257)


class JsonTest(parameterized.TestCase):
  @parameterized.parameters(
    (("<s>", "</s>"), (3, 4)),
    (("</s>", "<s>"), (4, 3)),
    (("<|endoftext|>", "<|padding|>"), (3, 3)),
    (("[BOS]", "[EOS]"), (3, 4)),
    (("<|end_of_text|>",), (3, 3)),
    (("[PAD]",), (None, None)),
    (("<s>", "</s>", "<|begin_of_text|>", "<|end_of_text|>"), (5, 6)),
  )
  def test_begin_and_end_are_found_by_name(self, specials, expected):
    tokenizer = _words(*specials)
    self.assertEqual((tokenizer.bos_id, tokenizer.eos_id), expected)

  def test_vocabulary_counts_gaps(self):
    tokenizer = hf.Tokenizer(hf.models.WordLevel({"a": 7}, unk_token="a"))
    content = tokenizer.to_str().encode()
    self.assertEqual(tokenizers.JsonTokenizer(content).vocab_size, 8)

  def test_truncation_and_padding_of_the_file_do_not_count(self):
    tokenizer = _words("<s>", enable_truncation=1)
    self.assertEqual(tokenizer.encode("a b a"), [0, 1, 0])
    self.assertEqual(tokenizer.encode_batch(["a", "a b"]), [[0], [0, 1]])


class WithSentencePieceTest(parameterized.TestCase):
  def test_text_comes_back(self):
    tokenizer = _sentencepiece()
    self.assertEqual((tokenizer.bos_id, tokenizer.eos_id), (1, 2))
    text = "the head 🤷🏽‍♀️ of layers </s>"
    ids = tokenizer.encode(text)
    self.assertEqual(tokenizer.encode_batch([text]), [ids])
    self.assertNotIn(tokenizer.eos_id, ids)
    self.assertEqual(tokenizer.decode([1, *ids, 2, 10**6]), text)
    again = pickle.loads(pickle.dumps(tokenizer))
    self.assertEqual(again.encode(text), ids)

  def test_stream_keeps_spaces_and_characters(self):
    tokenizer = _sentencepiece()
    text = "the head 🤷🏽‍♀️ of layers"
    stream = StreamDecoder(tokenizer)
    ids = [1, *tokenizer.encode(text), 2]
    parts = [stream.feed(token) for token in ids]
    self.assertEqual("".join(parts), text)
    self.assertNotIn("\ufffd", "".join(parts))

  @parameterized.parameters(
    ({"legacy": False}, "'legacy' is false, which needs a tokenizer.json"),
    ({"added_tokens_decoder": {"400": {"content": "<x>"}}}, "adds tokens"),
    (
      {"added_tokens_decoder": {"1": {"content": "<s>", "rstrip": True}}},
      "adds tokens to it, .*AutoTokenizer.*save_pretrained",
    ),
  )
  def test_what_a_model_alone_does_not_do_is_refused(self, config, message):
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    with self.assertRaisesRegex(tokenizers.TokenizerFileError, message):
      _sentencepiece(files)
    with self.assertRaisesRegex(tokenizers.TokenizerFileError, "adds tokens"):
      _sentencepiece({"added_tokens.json": b'{"<x>": 400}'})

  def test_own_tokens_may_be_listed(self):
    listed = {str(i): {"content": c} for i, c in ((1, "<s>"), (2, "</s>"))}
    config = {"added_tokens_decoder": listed, "legacy": True}
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = _sentencepiece(files)
    ids = tokenizer.encode("<s>the head</s>", parse_special=True)
    self.assertEqual([ids[0], ids[-1]], [1, 2])
    self.assertEqual(ids[1:-1], tokenizer.encode("the head"))

  def test_one_of_begin_and_end_is_both(self):
    tokenizer = _sentencepiece(bos_id=-1, eos_id=1)
    self.assertEqual((tokenizer.bos_id, tokenizer.eos_id), (1, 1))


class LoadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_file_folder_and_bytes(self):
    content = _bpe().content
    (self.root / "tokenizer.json").write_bytes(content)
    for path in (self.root, self.root / "tokenizer.json"):
      tokenizer = tokenizers.load_tokenizer(path)
      self.assertEqual(tokenizer.content, content)
    tokenizer = tokenizers.load_tokenizer("bytes")
    self.assertEqual((tokenizer.vocab_size, tokenizer.eos_id), (257, 256))

  @parameterized.parameters(
    ("no.json", None, FileNotFoundError, "no.json: no such tokenizer"),
    ("", None, FileNotFoundError, "holds none of"),
    ("a.txt", b"", ValueError, "a.txt: a tokenizer file ends in one of"),
    ("a.json", b"{", ValueError, "a.json: not a tokenizer.json"),
    ("a.json", b"\xff", ValueError, "a.json: not a tokenizer.json"),
  )
  def test_wrong_files_are_named(self, name, content, error, message):
    if content is not None:
      (self.root / name).write_bytes(content)
    with self.assertRaisesRegex(error, message):
      tokenizers.load_tokenizer(self.root / name)

  def test_damaged_model_is_named_with_sentencepiece(self):
    (self.root / "a.model").write_bytes(b"no model")
    with self.assertRaisesRegex(ValueError, "a.model: not a SentencePiece"):
      tokenizers.load_tokenizer(self.root / "a.model")

  def test_missing_library_says_how_to_install_it(self):
    (self.root / "a.model").write_bytes(b"")
    with (
      mock.patch.dict(sys.modules, {"sentencepiece": None}),
      self.assertRaisesRegex(ValueError, r"pip install 'moh_jax\[llm\]'"),
    ):
      tokenizers.load_tokenizer(self.root / "a.model")

  def test_unknown_kind_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, "'words' must be one of"):
      tokenizers.tokenizer_from_bytes("words", json.dumps({}).encode())


if __name__ == "__main__":
  absltest.main()
