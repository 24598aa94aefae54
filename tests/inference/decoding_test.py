"""Which tokens are chosen, how often, and the two jitted halves around it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config.llm import Sampling
from moh_jax.inference.decoding import (
  choose_tokens,
  span_numbers,
)
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
