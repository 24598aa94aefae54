"""Generation: which tokens, which text, and what is refused."""

import dataclasses
import functools
import json
import os
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config import apply_overrides
from moh_jax.config.llm import Sampling
from moh_jax.data.chat import chat_ids
from moh_jax.data.tokenizers import END, JsonTokenizer
from moh_jax.inference import generate
from moh_jax.inference.decoding import (
  choose_tokens,
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.inference.generate import Generator, complete_file
from moh_jax.models.llm import LLM, unroll
from moh_jax.models.registry import make_model
from moh_jax.ops.kernels import decode
from tests.data import tiny_words
from tests.folders import FolderTest
from tests.inference import tiny_writer

_PROMPTS = ((5, 9, 33), (7,), (1, 2, 3, 4, 5, 6, 7), (40, 41, 42, 40, 41))
_SHORT = Sampling(max_new_tokens=2)
_GREEDY = Sampling(max_new_tokens=6)
_DRAWN = Sampling(max_new_tokens=6, temperature=1.0, seed=3)


def _config(router="two_stage", straight_through="selected", **changes):
  changes["router"] = {"kind": router, "straight_through": straight_through}
  return apply_overrides(tiny_writer.RANDOM, "model", **changes)


def _generator(config=None, **options):
  return tiny_writer.generator(config or _config(), **options)


def _alphabet(tokenizer=tiny_writer.WORDS, **options):
  params = tiny_writer.alphabet_params()
  restored = tiny_writer.restored(tiny_writer.ALPHABET, params)
  return Generator(restored, tokenizer, **options)


@functools.cache
def _written(router="two_stage", sampling=_GREEDY):
  return _generator(_config(router)).generate(_PROMPTS, sampling)


def _tokens(completions):
  return [completion.tokens for completion in completions]


class TokensTest(parameterized.TestCase):
  @parameterized.parameters(
    ("two_stage", _GREEDY), ("two_stage", _DRAWN), ("query_norm", _GREEDY)
  )
  def test_tokens_and_probabilities_are_those_of_the_whole_text(
    self, router, sampling
  ):
    written, config = _written(router, sampling), _config(router)
    whole = np.zeros((len(_PROMPTS), 24), np.int32)
    for row, prompt, completion in zip(whole, _PROMPTS, written):
      text = [*prompt, *completion.tokens]
      row[: len(text)] = text
    params = {"params": tiny_writer.random_params(config)}
    logits, _ = jax.jit(make_model(config)[0].apply)(params, whole)
    tables = np.asarray(jax.nn.log_softmax(logits))
    for table, prompt, completion in zip(tables, _PROMPTS, written):
      count, tokens = len(completion.tokens), completion.tokens
      table = table[len(prompt) - 1 :][:count]
      expected = table[np.arange(count), tokens]
      np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
      if sampling.greedy:
        self.assertEqual((count, tokens), (6, tuple(table.argmax(-1))))
    self.assertGreater(len(set(_tokens(written))), 1)

  def test_tokens_follow_from_prompt_and_seed_and_not_the_batch(self):
    theirs = _written(sampling=_DRAWN)
    one_by_one = _generator(size=1).generate(_PROMPTS, _DRAWN)
    self.assertEqual(_tokens(one_by_one), _tokens(theirs))
    self.assertEqual(_generator().generate(_PROMPTS, _DRAWN), theirs)
    for change in ({"seed": 4}, {"max_new_tokens": 36}):
      other = dataclasses.replace(_DRAWN, **change)
      written = _generator().generate(_PROMPTS, other)
      begins = [one.tokens[:6] for one in written]
      self.assertEqual(begins == _tokens(theirs), "seed" not in change)
    # More than one span of tokens.
    self.assertEqual(max(len(one.tokens) for one in written), 36)
    for one in written:
      self.assertEqual(one.finish_reason == "length", len(one.tokens) == 36)

  def test_a_cache_of_16_bits_writes_the_same(self):
    params, half = tiny_writer.random_params(_config()), mock.Mock()
    half.return_value = "bfloat16"
    with mock.patch.object(generate, "default_cache_dtype", half):
      restored = tiny_writer.restored(_config(), params)
      writer = Generator(restored, tiny_writer.WORDS, batch_size=4)
    both = writer.generate(_PROMPTS, _GREEDY), _written()
    self.assertEqual(*map(_tokens, both))
    ours, theirs = ([one.log_probs for one in found] for found in both)
    np.testing.assert_allclose(ours, theirs, atol=0.05)
    self.assertNotEqual(ours, theirs)  # the cache was rounded

  @pytest.mark.integration
  def test_eight_devices_are_the_same_model_and_write_the_same(self):
    meshed, theirs = _generator(on_mesh=True), _written(sampling=_DRAWN)
    prints = {_generator().fingerprint(), meshed.fingerprint()}
    self.assertLen(prints, 1)
    other = _generator(_config("query_norm")).fingerprint()
    self.assertNotIn(other, prints)
    ours = meshed.generate(_PROMPTS, _DRAWN)
    self.assertEqual(_tokens(ours), _tokens(theirs))
    for one, other in zip(ours, theirs):
      np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)

  # Only training needs the outputs of heads that were not chosen.
  @pytest.mark.integration
  def test_heads_at_work_alone_write_the_same(self):
    changes = {"router": "query_norm", "straight_through": "all"}
    changes["num_kv_heads"] = 2
    dense = _generator(_config(**changes, attention_impl="dense"), size=2)
    kernel = _generator(_config(**changes, attention_impl="kernel"), size=2)
    short, written = Sampling(max_new_tokens=3), []
    with mock.patch.object(
      decode, "decode_attention", wraps=decode.decode_attention
    ) as reader:
      for generator in (dense, kernel):
        written.append(generator.generate(_PROMPTS[:2], short))
    for one, other in zip(*written):
      self.assertEqual(one.tokens, other.tokens)
      np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    # Once a layer, while it is traced, with a table of the heads at work.
    tables = [call.args[3] is not None for call in reader.call_args_list]
    self.assertEqual(tables, [True, True])

  def test_a_token_copies_no_cache(self):
    slots, texts, config = 4096, 2, _config()
    model = LLM(config.model, unrolled=True)
    params = unroll(tiny_writer.random_params(config), config.model)
    tokens, none = jnp.zeros((texts, 4), jnp.int32), jnp.zeros(texts, jnp.int32)
    read = make_prefill(model, "float32")
    make = functools.partial(read, slots=slots)
    state = jax.eval_shape(make, params, tokens, none, none, none > 0)
    numbers = span_numbers(_GREEDY, 4)
    decode = make_decode(model, (), 4)
    program = decode.lower(params, state, numbers, True, False).compile()
    values = jax.tree.leaves(state.cache)
    size = sum(x.size * x.dtype.itemsize for x in values)
    self.assertLess(program.memory_analysis().temp_size_in_bytes, size / 4)


class TextTest(parameterized.TestCase):
  """The alphabet's model writes "bB", "cC", ... after "aA"."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.generator = _alphabet()
    cls.spaced = _alphabet(tiny_words.tokenizer(spaced=True))

  @parameterized.parameters(
    ("aA", (), 3, "bBcCdD", (2, 3, 4), "length"),
    # The end of text ends and is no text.
    ("xX", (), 9, "yYzZ", (25, 26, 28), "end"),
    ("zZ", (), 3, "", (28,), "end"),
    # The begin of text comes before texts alone.
    ("", (), 2, "aAbB", (1, 2), "length"),
    ((27,), (), 2, "aAbB", (1, 2), "length"),
    ((1,), (), 2, "bBcC", (2, 3), "length"),
    # Stops: a whole token; across three; the one that comes first; both in one
    # token: where the first begins.
    ("aA", ("dD",), 6, "bBcC", (2, 3, 4), "stop"),
    ("aA", ("DeEf",), 6, "bBcCd", (2, 3, 4, 5, 6), "stop"),
    ("aA", ("fF", "cC"), 6, "bB", (2, 3), "stop"),
    ("aA", ("CdD", "d"), 6, "bBc", (2, 3, 4), "stop"),
  )
  def test_what_is_written(self, prompt, stop, count, text, tokens, reason):
    sampling = Sampling(max_new_tokens=count, stop=stop)
    (written,) = self.generator.generate([prompt], sampling)
    self.assertEqual((written.text, written.tokens), (text, tokens))
    self.assertEqual(written.finish_reason, reason)
    self.assertLen(written.log_probs, len(tokens))
    expected = 8 - np.log(np.exp(8) + 59)
    np.testing.assert_allclose(written.log_probs, expected, atol=1e-4)

  @parameterized.parameters(
    ("aA", (), ["bB", "cC", "dD", "eE"]),
    # What may begin a stop is held back, and given where it was not it.
    ("aA", ("Dx",), ["bB", "cC", "d", "DeE"]),
    ("aA", ("cCdDx",), ["bB", "cCdDeE"]),
    ("aA", ("EfF",), ["bB", "cC", "dD", "eE"]),  # nothing follows: no reason to
    ("aA", ("E", "CdD"), ["bB", "c"]),
    ("vV", ("zZ",), ["wW", "xX", "yY"]),
    # Words with spaces between them: also between the prompt and the first.
    ("aA", (), [" bB", " cC", " dD", " eE"], True),
    ("", (), ["aA", " bB", " cC", " dD"], True),
    ((1,), (" cC",), [" bB"], True),
    ("aA", ("A bB", " dD"), [" bB", " cC"], True),
  )
  def test_stream_gives_the_text_in_pieces(
    self, prompt, stop, pieces, spaced=False
  ):
    generator = self.spaced if spaced else self.generator
    sampling = Sampling(max_new_tokens=4, stop=stop)
    self.assertEqual(list(generator.stream(prompt, sampling)), pieces)
    (completion,) = generator.generate([prompt], sampling)
    self.assertEqual(completion.text, "".join(pieces))


class SpecialTokensTest(parameterized.TestCase):
  def _generator(self, files=()):
    return _alphabet(JsonTokenizer(tiny_writer.WORDS.content, dict(files)))

  @parameterized.parameters((3, 3), ([9, 4, 9], 4))
  @pytest.mark.integration
  def test_each_stop_of_the_model_ends_a_text(self, stops, last):
    file = json.dumps({"eos_token_id": stops}).encode()
    generator = self._generator({"generation_config.json": file})
    sampling = Sampling(max_new_tokens=9)
    ended, at_the_end = generator.generate(["aA", "yY"], sampling)
    self.assertEqual(ended.tokens, tuple(range(2, last + 1)))
    self.assertEqual(ended.finish_reason, "end")
    self.assertEqual(at_the_end.tokens, (26, 28))

  def test_texts_begin_where_the_tokenizer_says_so(self):
    file = json.dumps({"bos_token": None, "eos_token": END}).encode()
    for files, ids in (({}, [27, 1]), ({"tokenizer_config.json": file}, [1])):
      encode = self._generator(files).encode
      self.assertEqual(encode(0, "aA", _SHORT), ids)

  def test_answers_a_conversation(self):
    source = "{{ bos_token }}{{ messages[-1].content }}{% if messages[1:] %}bB"
    files = {"chat_template.jinja": f"{source}{{% endif %}}".encode()}
    generator = self._generator(files)
    messages = [{"role": "user", "content": f"aA{END}"}]
    # The name of a special token is that token, and the text begins once.
    ids = chat_ids(generator.tokenizer, messages, None)
    self.assertEqual(ids, [27, 1, 28])
    messages = [{"role": "user", "content": "bB"}, *messages]
    completion = generator.chat(messages, Sampling(max_new_tokens=3))
    self.assertEqual(completion.text, "cCdDeE")
    with self.assertRaisesRegex(ValueError, "prompt 0 has 4 tokens; with max"):
      generator.chat(messages, Sampling(max_new_tokens=30))
    message = "no chat template 'default' .*, nor any other; .*=chatml"
    with self.assertRaisesRegex(ValueError, message):
      self._generator().chat(messages)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("abc", "prompts='abc' must be a list of prompts"),
    ([(1,), ()], "prompt 1 is empty"),
    ([(1, 60)], r"prompt 0: token 60 must be in \[0, 60\)"),
    ([(1,), (1,) * 31], "prompt 1 has 31 tokens; with .*max_length=32"),
    ([], "257 ids, more than .*_size=60", tiny_writer.BYTES),
  )
  def test_bad_prompts_and_tokenizers_are_named(
    self, prompts, message, tokenizer=tiny_writer.WORDS
  ):
    with self.assertRaisesRegex(ValueError, message):
      _alphabet(tokenizer).generate(prompts, _SHORT)


_TEXTS = [
  "".join(tiny_words.WORDS[(i + j) % 26] for j in range(1 + i % 5))
  for i in range(23)
]
_WARM = Sampling(max_new_tokens=4, temperature=2.0, seed=3)


class PromptFileTest(FolderTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.generator = _generator(tiny_writer.RANDOM, size=2)

  def setUp(self):
    super().setUp()
    self.out = self.root / "out.jsonl"

  def _complete(self, prompts=_TEXTS, sampling=_WARM, **settings):
    return complete_file(
      self.generator, prompts, self.out, sampling, settings=settings
    )

  def test_lines_are_those_of_one_call(self):
    with self.assertRaisesRegex(ValueError, "prompt 1 has 101 tokens"):
      self._complete(prompts=["aA", "aA" * 100])
    self.assertEmpty(os.listdir(self.root))
    self.assertEqual(self._complete(), 0)
    rows = [json.loads(line) for line in self.out.read_text().splitlines()]
    whole = self.generator.generate(_TEXTS, _WARM)
    for index, (row, text, one) in enumerate(
      zip(rows, _TEXTS, whole, strict=True)
    ):
      self.assertLen(row.pop("log_probs"), len(one.tokens))
      expected = {"index": index, "prompt": text, "text": one.text}
      expected |= {"tokens": [*one.tokens]}
      self.assertEqual(row, expected | {"finish_reason": one.finish_reason})
    self.assertGreater(len({row["text"] for row in rows}), 15)

  def test_a_killed_call_continues_to_the_same_file(self):
    write = self.generator.generate

    def fail(chunk, sampling, first):
      if first:
        raise OSError("killed")
      return write(chunk, sampling, first=first)

    with mock.patch.object(self.generator, "generate", fail):
      with self.assertRaisesRegex(OSError, "killed"):
        self._complete()
    self.assertLen(self.out.read_text().splitlines(), 16)
    self.assertEqual(self._complete(), 16)
    expected = self.out.read_bytes()
    lines = expected.splitlines(keepends=True)
    # A chunk that is half written is made again, in the same batches.
    part = lines[0][:9]
    for there, kept in (([part], 0), ([*lines[:20], part], 16), (lines, 23)):
      self.out.write_bytes(b"".join(there))
      self.assertEqual(self._complete(), kept)
      self.assertEqual(self.out.read_bytes(), expected)

  def test_output_of_other_settings_is_refused(self):
    self._complete(checkpoint="a")
    before = self.out.read_bytes()
    for message, options in (
      ("prompts: '.*' here, '.*' there", {"prompts": ["xX"]}),
      ("checkpoint: 'b' here, 'a' there", {"checkpoint": "b"}),
      ("seed: 4 here, 3 there", {"sampling": Sampling(4, 2.0, seed=4)}),
    ):
      with self.assertRaisesRegex(ValueError, f"other settings; {message}"):
        self._complete(**{"checkpoint": "a"} | options)
    self.assertEqual(self.out.read_bytes(), before)
    (self.root / "out.jsonl.settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "exists, and no out.jsonl.set"):
      self._complete(checkpoint="a")


_SAMPLES = 4000
_PROBS = np.array([0.05, 0.5, 0.15, 0.3])  # token 1, then 3, 2, 0
_CUTS = {}, {"top_k": 3}, {"top_p": 0.9}


def _choose(logits, keys, **options):
  sampling = Sampling(**options)
  numbers = span_numbers(sampling, 1)
  return choose_tokens(
    logits, keys, numbers, greedy=sampling.greedy, cut=sampling.cut
  )


def _sample(probs, **options):
  """Tokens of many rows of equal probabilities."""
  logits = jnp.tile(jnp.log(jnp.asarray(probs)), (_SAMPLES, 1))
  keys = jax.random.split(jax.random.key(0), _SAMPLES)
  return np.asarray(_choose(logits, keys, **options)[0])


class ChooseTokensTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.logits = jnp.asarray(3 * rng.normal(size=(5, 11)), jnp.float32)
    self.keys = jax.random.split(jax.random.key(0), 5)

  @parameterized.parameters(
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 5.0, "top_p": 1e-6},
    {"temperature": 1e-4},
  )
  def test_is_the_best_token(self, **options):
    tokens, log_probs = _choose(self.logits, self.keys, **options)
    chex.assert_type((tokens, log_probs), (jnp.int32, jnp.float32))
    np.testing.assert_array_equal(tokens, self.logits.argmax(-1))
    # The probability is the model's own, at temperature 1 and without cuts.
    expected = jax.nn.log_softmax(self.logits)[np.arange(5), tokens]
    np.testing.assert_allclose(log_probs, expected, rtol=1e-6)
    ties = jnp.array([[0.0, 2.0, 1.0, 2.0]])
    self.assertEqual(int(_choose(ties, self.keys[:1])[0][0]), 1)

  @parameterized.parameters(
    ({"temperature": 0.5}, (0, 1, 2, 3)),
    ({"temperature": 2.0}, (0, 1, 2, 3)),
    ({"top_k": 2}, (1, 3)),
    ({"top_k": 99}, (0, 1, 2, 3)),
    ({"top_p": 0.79}, (1, 3)),
    ({"top_p": 0.81}, (1, 2, 3)),
    # Of the two best, 0.625 and 0.375, the first reaches 0.6 alone.
    ({"top_k": 2, "top_p": 0.6}, (1,)),
    ({"top_k": 2, "top_p": 0.7}, (1, 3)),
    # At temperature 4 the best token has 0.5 ** 0.25 / 2.916 = 0.29 alone.
    ({"top_p": 0.4, "temperature": 4.0}, (1, 3)),
    # Two of four tokens are masked.
    *((cut, (0, 2), (0.5, 0, 0.5, 0)) for cut in _CUTS),
  )
  def test_tokens_that_are_kept_are_as_frequent_as_they_should(
    self, options, kept, probs=_PROBS
  ):
    options = {"temperature": 1.0, **options}
    shares = np.bincount(_sample(probs, **options), minlength=4) / _SAMPLES
    chosen = np.isin(np.arange(4), kept)
    expected = chosen * np.power(probs, 1 / options["temperature"])
    expected /= expected.sum()
    # Five standard deviations of a share of this many samples.
    spread = 5 * np.sqrt(expected * (1 - expected) / _SAMPLES)
    np.testing.assert_array_less(np.abs(shares - expected), spread + 1e-9)
