"""The options of generation, and its two jitted halves."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.llm import Sampling
from moh_jax.inference.decoding import (
  NO_TOKEN,
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.models.llm import LLM, unroll
from tests.inference import tiny_writer

_CONFIG = tiny_writer.ALPHABET.model
_P, _SLOTS, _SPAN = 4, 16, 3


class SamplingTest(parameterized.TestCase):
  @parameterized.parameters(
    ("max_new_tokens", 0, "at least 1"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", float("nan"), "at least 0"),
    ("temperature", float("inf"), "at least 0"),
    ("top_k", -1, "at least 0"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_p", 1.1, "(0, 1]"),
    ("top_p", float("nan"), "(0, 1]"),
    ("seed", -1, "[0, 4294967295]"),
    ("seed", 2**32, "[0, 4294967295]"),
  )
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      Sampling(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"{field}={value} must be ")
    self.assertIn(allowed, message)

  def test_empty_stop_text_is_refused(self):
    with self.assertRaisesRegex(ValueError, "stop='' must not be empty"):
      Sampling(stop=("a", ""))

  @parameterized.parameters(("seed", 2**32 - 1), ("top_p", 1.0), ("top_k", 0))
  def test_range_includes_its_last_value(self, field, value):
    self.assertEqual(getattr(Sampling(**{field: value}), field), value)


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
  padding = np.int32([3, 0])
  rows = np.int32([0, 1])
  prefill, _ = _halves()
  return prefill(tokens, padding, rows, np.array(finished), _SLOTS)


def _decode(state, first=0, count=_SPAN):
  _, decode = _halves()
  return decode(state, span_numbers(Sampling(), first, count), True, False)


class HalvesTest(absltest.TestCase):
  def test_prefill_predicts_the_next_token_and_fills_the_slots(self):
    state = _start()
    self.assertEqual(int(state.slot), _P)
    np.testing.assert_array_equal(state.logits.argmax(-1), [2, 28])
    chex.assert_type(state.logits, jnp.float32)
    keys = state.cache[0][0].k  # of the first stack, its first layer
    chex.assert_shape(keys, (2, _CONFIG.num_kv_heads, _SLOTS, 8))

  def test_decode_writes_until_the_end_of_text(self):
    state, tokens, log_probs = _decode(_start())
    self.assertEqual(tokens[0].tolist(), [2, 3, 4])
    self.assertEqual(tokens[1].tolist(), [28, NO_TOKEN, NO_TOKEN])
    np.testing.assert_array_equal(state.finished, [False, True])
    self.assertEqual(int(state.slot), _P + 3)
    chex.assert_shape(log_probs, (2, _SPAN))

  def test_each_of_the_stops_ends_a_text(self):
    state = _start()
    for first in (0, 3, 6):
      state, tokens, _ = _decode(state, first=first)
    self.assertEqual(tokens[0].tolist(), [8, 9, NO_TOKEN])

  def test_decode_writes_no_more_than_is_wanted(self):
    state, tokens, _ = _decode(_start(), count=2)
    self.assertEqual(tokens[0].tolist(), [2, 3, NO_TOKEN])
    self.assertEqual(int(state.slot), _P + 2)

  def test_decode_goes_on_where_it_was(self):
    state, _, _ = _decode(_start(), count=2)
    _, tokens, _ = _decode(state, first=2, count=2)
    self.assertEqual(tokens[0].tolist(), [4, 5, NO_TOKEN])
    self.assertEqual(tokens[1].tolist(), [NO_TOKEN] * 3)

  def test_finished_rows_take_no_step(self):
    state, tokens, _ = _decode(_start(finished=(True, True)))
    np.testing.assert_array_equal(tokens, np.full((2, _SPAN), NO_TOKEN))
    self.assertEqual(int(state.slot), _P)

  def test_other_numbers_of_steps_compile_nothing(self):
    _, decode = _halves()
    _decode(_start())
    size = decode.func._cache_size()
    _decode(_start(), first=5, count=1)
    self.assertEqual(decode.func._cache_size(), size)


if __name__ == "__main__":
  absltest.main()
