"""Which tokens are chosen, how often, and the two jitted halves around it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.llm import Sampling
from moh_jax.inference.decoding import (
  NO_TOKEN,
  choose_tokens,
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.models.llm import LLM, unroll
from tests.inference import tiny_writer

_SAMPLES = 4000
_PROBS = np.array([0.05, 0.5, 0.15, 0.3])  # token 1, then 3, 2, 0
_CONFIG = tiny_writer.ALPHABET.model
_P, _SLOTS, _SPAN = 4, 16, 3


class SamplingTest(parameterized.TestCase):
  @parameterized.parameters(
    ("max_new_tokens", 0, "be at least 1"),
    ("temperature", float("nan"), "be at least 0"),
    ("top_k", -1, "be at least 0"),
    ("top_p", 0.0, "be in (0, 1]"),
    ("seed", 2**32, "be in [0, 4294967295]"),
    ("stop", ("a", ""), "not be empty"),
  )
  def test_message_names_field_and_what_is_allowed(self, field, value, allowed):
    with self.assertRaises(ValueError) as caught:
      Sampling(**{field: value})
    self.assertStartsWith(str(caught.exception), f"{field}=")
    self.assertEndsWith(str(caught.exception), f"must {allowed}")


def _choose(logits, keys, **options):
  sampling = Sampling(**options)
  numbers = span_numbers(sampling, 0, 1)
  return choose_tokens(
    logits, keys, numbers, greedy=sampling.greedy, cut=sampling.cut
  )


def _sample(logits, rows=_SAMPLES, **options):
  """Tokens of `rows` equal rows, [rows]."""
  logits = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
  keys = jax.random.split(jax.random.key(0), rows)
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

  def test_ties_of_the_best_go_to_the_lowest_id(self):
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0]])
    self.assertEqual(int(_choose(logits, self.keys[:1])[0][0]), 1)

  @parameterized.parameters((0.5, 0), (1.0, 0), (2.0, 0), (1.0, 2))
  def test_samples_are_as_frequent_as_they_should(self, temperature, top_k):
    tokens = _sample(np.log(_PROBS), temperature=temperature, top_k=top_k)
    shares = np.bincount(tokens, minlength=4) / _SAMPLES
    expected = _PROBS ** (1 / temperature)
    if top_k:
      expected[np.argsort(_PROBS)[:-top_k]] = 0
    expected /= expected.sum()
    # Five standard deviations of a share of this many samples.
    spread = 5 * np.sqrt(expected * (1 - expected) / _SAMPLES)
    np.testing.assert_array_less(np.abs(shares - expected), spread + 1e-9)

  @parameterized.parameters(
    ({"top_k": 2}, (1, 3)),
    ({"top_k": 3}, (1, 2, 3)),
    ({"top_k": 99}, (0, 1, 2, 3)),
    ({"top_p": 0.4}, (1,)),
    ({"top_p": 0.79}, (1, 3)),
    ({"top_p": 0.81}, (1, 2, 3)),
    ({"top_p": 0.96}, (0, 1, 2, 3)),
    # Of the two best, 0.625 and 0.375, the first reaches 0.6 alone.
    ({"top_k": 2, "top_p": 0.6}, (1,)),
    ({"top_k": 2, "top_p": 0.7}, (1, 3)),
    # At temperature 4 the best token has 0.5 ** 0.25 / 2.916 = 0.29 alone.
    ({"top_p": 0.4, "temperature": 4.0}, (1, 3)),
  )
  def test_samples_all_tokens_that_are_kept_and_no_other(self, options, kept):
    tokens = _sample(np.log(_PROBS), **{"temperature": 1.0, **options})
    self.assertEqual(tuple(np.unique(tokens)), kept)

  @parameterized.parameters({}, {"top_k": 3}, {"top_p": 0.9})
  def test_masked_tokens_are_never_sampled(self, **options):
    tokens = _sample([0.0, -np.inf, 0.0, -np.inf], temperature=1.0, **options)
    self.assertEqual(tuple(np.unique(tokens)), (0, 2))

  def test_rows_are_sampled_by_their_keys_alone(self):
    logits, keys = jnp.zeros((5, 1000)), self.keys
    tokens, _ = _choose(logits, keys, temperature=1.0)
    again, _ = _choose(logits[2:4], keys[2:4], temperature=1.0)
    np.testing.assert_array_equal(again, tokens[2:4])
    self.assertLen(set(tokens.tolist()), 5)


@functools.cache
def _halves():
  model = LLM(_CONFIG, unrolled=True)
  params = unroll(tiny_writer.alphabet_params(), _CONFIG)
  prefill = make_prefill(model, "float32")
  decode = make_decode(model, (9, tiny_writer.WORDS.eos_id), _SPAN)
  return functools.partial(prefill, params), functools.partial(decode, params)


def _start(finished=(False, False)):
  """Two prompts: "aA" after padding, and "wW" to "zZ"."""
  tokens = np.int32([[0, 0, 0, 1], [23, 24, 25, 26]])
  padding, rows = np.int32([3, 0]), np.int32([0, 1])
  return _halves()[0](tokens, padding, rows, np.array(finished), _SLOTS)


def _decode(state, first=0, count=_SPAN):
  numbers = span_numbers(Sampling(), first, count)
  return _halves()[1](state, numbers, True, False)


class HalvesTest(absltest.TestCase):
  def test_prefill_predicts_the_next_token_and_fills_the_slots(self):
    state = _start()
    self.assertEqual(int(state.slot), _P)
    np.testing.assert_array_equal(state.logits.argmax(-1), [2, 28])
    chex.assert_type(state.logits, jnp.float32)
    keys = state.cache[0][0].k  # of the first stack, its first layer
    chex.assert_shape(keys, (2, _CONFIG.num_kv_heads, _SLOTS, 8))

  def test_decode_writes_until_an_end_of_text(self):
    state, written = _start(), []
    for first in (0, 3, 6):
      state, tokens, log_probs = _decode(state, first=first)
      np.testing.assert_array_equal(state.finished, [first == 6, True])
      written.append(tokens)
    self.assertEqual(int(state.slot), _P + 8)
    chex.assert_shape(log_probs, (2, _SPAN))
    first, second = np.concatenate(written, axis=1).tolist()
    self.assertEqual(first, [*range(2, 10), NO_TOKEN])
    self.assertEqual(second, [28, *[NO_TOKEN] * 8])

  def test_decode_goes_on_where_it_was(self):
    state, tokens, _ = _decode(_start(), count=2)
    self.assertEqual(tokens[0].tolist(), [2, 3, NO_TOKEN])
    self.assertEqual(int(state.slot), _P + 2)
    _, tokens, _ = _decode(state, first=2, count=2)
    self.assertEqual(tokens.tolist(), [[4, 5, NO_TOKEN], [NO_TOKEN] * 3])

  def test_finished_rows_take_no_step(self):
    state, tokens, _ = _decode(_start(finished=(True, True)))
    np.testing.assert_array_equal(tokens, np.full((2, _SPAN), NO_TOKEN))
    self.assertEqual(int(state.slot), _P)
