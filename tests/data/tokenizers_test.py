"""Tokenizers, the files beside them, and chat templates."""

import functools
import hashlib
import itertools
import json
import pathlib
import pickle
import random

import pytest
import tokenizers as hf
from absl.testing import parameterized

from moh_jax.data import tokenizers
from moh_jax.data.chat import Template, template_names
from moh_jax.data.tokenizers import load_tokenizer, read_files_beside
from moh_jax.inference.decoding import StreamDecoder
from tests.data import tiny_words
from tests.folders import FolderTest

pytest.importorskip("transformers")

_CORPUS = ["def head(x):\n  return x\n" * 20, "the heads of the layer " * 50]


def _bpe(vocab_size=300):
  content = tokenizers.train_bpe(iter(_CORPUS), vocab_size)
  return tokenizers.JsonTokenizer(content)


def _metaspace(scheme):
  """A tokenizer.json whose words begin with their space."""
  trained = hf.Tokenizer(hf.models.BPE())
  trained.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme)
  trained.decoder = hf.decoders.Metaspace(prepend_scheme=scheme)
  trained.train_from_iterator(_CORPUS, hf.trainers.BpeTrainer(vocab_size=60))
  trained.add_tokens(["<shown>", "[a] "])
  trained.add_special_tokens(["<s>", "</s>"])
  return tokenizers.JsonTokenizer(trained.to_str().encode())


def _sentencepiece(**files):
  named = {f"{name}.json": json.dumps(v).encode() for name, v in files.items()}
  return tokenizers.SentencePieceTokenizer(
    tiny_words.sentencepiece_model(), named
  )


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(_bpe, tokenizers.BytesTokenizer)
  def test_text_comes_back(self, make):
    tokenizer = make()
    again = pickle.loads(pickle.dumps(tokenizer))
    self.assertEqual(again.sha256, tokenizer.sha256)
    special = [tokenizer.bos_id, tokenizer.eos_id]
    for text in (*_texts(), "<|end_of_text|> is text, a\x00b\x7f\u2028c \r\n"):
      ids = tokenizer.encode(text)
      self.assertEqual(tokenizer.decode(ids), text)
      self.assertNoCommonElements(ids, special)
      self.assertEqual(again.encode(text), ids)


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

  @parameterized.parameters(
    ("é🤷".encode()[:-1], ["", "é", "", "", ""], "\ufffd"),
    (b"\xff" * 99, None, "\ufffd" * 99),  # which is no text waits not forever
  )
  def test_half_a_character_waits_and_is_marked(self, ids, pieces, text):
    stream = StreamDecoder(tokenizers.BytesTokenizer())
    parts = [stream.feed(token) for token in ids]
    if pieces:
      self.assertEqual(parts, pieces)
    else:
      self.assertGreater(len("".join(parts)), 79)
    self.assertEndsWith("".join(parts) + stream.flush(), text)
    self.assertEqual(stream.feed(ord("a")), "a")


class WithSentencePieceTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"tokenizer_config": {"legacy": False}}, "'legacy' false; .*json"),
    ({"tokenizer_config": {"added_tokens_decoder":
      {"400": {"content": "<x>"}}}}, "adds tokens"),
    ({"tokenizer_config": {"added_tokens_decoder":
      {"1": {"content": "<s>", "rstrip": True}}}}, "adds tokens"),
    ({"added_tokens": {"<x>": 400}}, "adds tokens"),
  )  # fmt: skip
  def test_what_a_model_alone_does_not_do_is_refused(self, files, message):
    with self.assertRaisesRegex(ValueError, message):
      _sentencepiece(**files)

  def test_own_tokens_may_be_listed(self):
    listed = {str(i): {"content": c} for i, c in ((1, "<s>"), (2, "</s>"))}
    config = {"added_tokens_decoder": listed, "legacy": True}
    tokenizer = _sentencepiece(tokenizer_config=config)
    self.assertEqual((tokenizer.bos_id, tokenizer.eos_id), (1, 2))
    ids = tokenizer.encode("<s>the head</s>", parse_special=True)
    self.assertEqual([ids[0], ids[-1]], [1, 2])
    self.assertEqual(ids[1:-1], tokenizer.encode("the head"))
    self.assertEqual(tokenizer.decode([*ids, 10**6]), "the head")


class LoadTest(FolderTest):
  @parameterized.parameters(
    ("no.json", None, FileNotFoundError, "no.json: no such tokenizer"),
    ("no", None, FileNotFoundError, "no: no such tokenizer"),
    ("", None, FileNotFoundError, "tokenizer.json: no such tokenizer"),
    ("a.json", b"{", ValueError, "a.json: not a tokenizer.json"),
    ("a.json", b"\xff", ValueError, "a.json: not a tokenizer.json"),
    ("a.model", b"", ValueError, "a.model: not a SentencePiece model"),
  )
  def test_wrong_files_are_named(self, name, content, error, message):
    if content is not None:
      (self.root / name).write_bytes(content)
    with self.assertRaisesRegex(error, message):
      tokenizers.load_tokenizer(self.root / name)

  def test_equal_texts_have_equal_ids(self):
    stored = json.loads(tokenizers.train_bpe(iter(_CORPUS), 300))
    stored["model"]["dropout"] = 0.5
    used = tokenizers.JsonTokenizer(json.dumps(stored).encode())
    self.assertLen({tuple(used.encode(_CORPUS[0])) for _ in range(9)}, 1)


def _content(template=None, specials=("<s>", "</s>", "<e>"), word=0):
  """A tokenizer.json of one word, id 0, and special tokens from id 1 on."""
  made = hf.Tokenizer(hf.models.WordLevel({"a": word}, unk_token="a"))
  made.add_special_tokens(list(specials))
  if template:
    ids = [(token, made.token_to_id(token)) for token in specials]
    made.post_processor = hf.processors.TemplateProcessing(
      single=template, special_tokens=ids
    )
  return made.to_str().encode()


def _tokenizer(template=None, **files):
  named = {f"{name}.json": json.dumps(v).encode() for name, v in files.items()}
  return tokenizers.JsonTokenizer(_content(template), named)


class SpecialIdsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Nothing says anything: by name.
    (None, {}, (1, 2, True)),
    # The tokenizer's own file does.
    ("<s>:0 $A:0 <e>:0", {}, (1, 3, True)),
    # tokenizer_config.json says tokens, and the own file where they go.
    (None, {"bos": "<s>", "eos": "<e>"}, (1, 3, False)),
    ("<s>:0 $A:0", {"bos": "<s>", "eos": "<e>"}, (1, 3, True)),
    (None, {"bos": {"content": "<s>"}, "eos": "</s>"}, (1, 2, False)),
    (None, {"bos": None, "eos": "<e>"}, (None, 3, False)),
    # It says both.
    (None, {"bos": "<s>", "add_bos": True}, (1, None, True)),
    ("<s>:0 $A:0", {"bos": "<s>", "add_bos": False}, (1, None, False)),
    # It names no token.
    (None, {"length": 8}, (1, 2, False)),
  )
  def test_what_a_file_says_comes_first(self, template, config, expected):
    config = {f"{name}_token": value for name, value in config.items()}
    files = {"tokenizer_config": config} if config else {}
    found = _tokenizer(template, **files)
    self.assertEqual((found.bos_id, found.eos_id, found.add_bos), expected)

  @parameterized.parameters(
    (("<s>", "</s>"), (1, 2)),
    (("<|endoftext|>", "<|padding|>"), (1, 1)),
    (("<|end_of_text|>",), (1, 1)),
    (("[PAD]",), (None, None)),
    (("<s>", "</s>", "<|begin_of_text|>", "<|end_of_text|>"), (3, 4)),
  )
  def test_begin_and_end_are_found_by_name(self, specials, expected):
    found = tokenizers.JsonTokenizer(_content(specials=specials))
    self.assertEqual((found.bos_id, found.eos_id), expected)
    found = tokenizers.JsonTokenizer(_content(specials=(), word=7))
    self.assertEqual(found.vocab_size, 8)  # gaps count

  @parameterized.parameters((0, (0, 2)), ([3, 0, 3], (3, 0, 2)), (None, (2,)))
  def test_stops_are_those_of_generation_and_the_end(self, stored, expected):
    found = _tokenizer(generation_config={"eos_token_id": stored})
    self.assertEqual(found.stop_ids, expected)

  @parameterized.parameters(
    ("tokenizer_config", [], "config.json: Expected `object`, got `array`"),
    ("tokenizer_config", {"eos_token": "<x>"}, "eos_token='<x>' is no token"),
  )
  def test_damage_is_named(self, name, value, message):
    with self.assertRaisesRegex(ValueError, message):
      _tokenizer(**{name: value})


class FilesBesideTest(FolderTest):
  @parameterized.parameters(
    (None, [1, 2], [1, 2]), ({"top_p": 0.5}, 7, 7), ({"eos_token_id": 3}, 7, 3)
  )
  def test_stops_of_the_model_stand_in(self, generation, stops, expected):
    config = json.dumps({"eos_token_id": stops})
    (self.root / "config.json").write_text(config)
    path = self.root / "generation_config.json"
    if generation is not None:
      path.write_text(json.dumps(generation))
    made = json.loads(read_files_beside(self.root)[path.name])
    self.assertEqual(made, {**(generation or {}), "eos_token_id": expected})


_USER = [{"role": "user", "content": "aA"}]


def _chat_tokenizer(files):
  tokenizer = tiny_words.tokenizer()
  tokenizer.files = {name: text.encode() for name, text in files.items()}
  return tokenizer


def _config(stored):
  return {"tokenizer_config.json": json.dumps({"chat_template": stored})}


def _render(source, messages=_USER, **options):
  tokenizer = _chat_tokenizer({"chat_template.jinja": source})
  return Template(tokenizer).render(messages, **options)


class TemplatesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"chat_template.jinja": "x"},),
    (_config("x"),),
    (_config([{"name": "default", "template": "x"}]),),
    ({"chat_template.jinja": "x", **_config("y")},),
  )
  def test_default_is_found(self, files):
    found = Template(_chat_tokenizer(files))
    self.assertEqual(found.render(_USER), "x")

  def test_others_have_names(self):
    rag = "additional_chat_templates/rag.jinja"
    tokenizer = _chat_tokenizer({"chat_template.jinja": "x", rag: "y"})
    self.assertEqual(template_names(tokenizer), ("default", "rag"))
    self.assertEqual(Template(tokenizer, "rag").render(_USER), "y")
    message = "no .*'tool' .*, only default, rag"
    with self.assertRaisesRegex(ValueError, message):
      Template(tokenizer, "tool")


class TemplateErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("{{ raise_exception('no\nway') }}", "jinja: TemplateError: no way"),
    ("{{ nobody.is.here }}", "jinja: UndefinedError: "),
    ("a\n{% if %}", "jinja, line 2: "),
    # Nothing outside of the sandbox is within reach.
    ("{{ messages.append(1) }}", "jinja: SecurityError"),
    ("{{ cycler.__init__.__globals__.os }}", "jinja: SecurityError"),
  )
  def test_errors_are_one_line_that_names_the_file(self, source, message):
    with self.assertRaises(ValueError) as caught:
      _render(source)
    text = str(caught.exception)
    self.assertStartsWith(text, "chat_template.jinja")
    self.assertIn(message, text)
    self.assertNotIn("\n", text)


_RECORDED = pathlib.Path(__file__).parent / "recorded"
_VERSIONS = ("4.57.6", "5.23.0")
_NAMES = ("gpt2", "llama2_json", "llama3", "qwen2")


@functools.cache
def _texts():
  return json.loads((_RECORDED / "texts.json").read_text())


@functools.cache
def _encoded(name):
  """Tokens of all texts by how they are encoded."""
  tokenizer = load_tokenizer(_RECORDED / "tokenizers" / name)
  parsed = [tokenizer.encode(t, parse_special=True) for t in _texts()]
  before = [tokenizer.bos_id] if tokenizer.add_bos else []
  return {
    "as_text": tokenizer.encode_batch(_texts()),
    "parsed": parsed,
    "prompt": [before + ids for ids in parsed],
  }


@functools.cache
def _recorded(folder, version):
  path = _RECORDED / folder / f"transformers_{version}.json"
  return json.loads(path.read_text())


class TokensTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(_NAMES, _VERSIONS),
    ("llama2_legacy", "4.57.6"),  # version 5 has none
  )
  def test_a_thousand_texts_have_the_same_tokens(self, name, version):
    for how, recorded in _recorded("tokenizers", version)[name].items():
      ours = _encoded(name)[how]
      self.assertEqual(ours[:3], recorded["first"], how)
      digest = hashlib.sha256(json.dumps(ours).encode()).hexdigest()
      self.assertEqual(digest, recorded["sha256"], how)


class ChatTest(parameterized.TestCase):
  @parameterized.product(
    name=("llama2", "llama3", "chatml", "mistral", "gemma"), version=_VERSIONS
  )
  def test_conversations_have_the_same_text_and_tokens(self, name, version):
    folder = _RECORDED / "chat"
    conversations = json.loads((folder / "messages.json").read_text())
    tokenizer = load_tokenizer(_RECORDED / "tokenizers" / "llama2_json")
    source = (folder / f"{name}.jinja").read_bytes()
    tokenizer.files = tokenizer.files | {"chat_template.jinja": source}
    cases = 0
    for key, expected in _recorded("chat", version).items():
      style, conversation, prompt = key.split("/")
      if style != name:
        continue
      cases += 1
      render = functools.partial(
        Template(tokenizer).render,
        conversations[conversation],
        prompt=prompt == "True",
      )
      if "refused" in expected:
        with self.assertRaises(ValueError) as caught:
          render()
        self.assertEndsWith(str(caught.exception), expected["refused"])
        continue
      text = render()
      self.assertEqual(text, expected["text"], key)
      ids = tokenizer.encode(text, parse_special=True)
      self.assertEqual(ids, expected["ids"], key)
    self.assertEqual(cases, 14)
