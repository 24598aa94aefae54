"""Which tokens are sampled, and how often."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.inference.decoding import choose_tokens

_SAMPLES = 4000
_PROBS = np.array([0.05, 0.5, 0.15, 0.3])  # token 1, then 3, 2, 0


def _sample(logits, rows=_SAMPLES, seed=0, **options):
  """Tokens of `rows` equal rows, [rows]."""
  logits = jnp.broadcast_to(
    jnp.asarray(logits, jnp.float32), (rows, len(logits))
  )
  keys = jax.random.split(jax.random.key(seed), rows)
  tokens, _ = choose_tokens(logits, keys, **options)
  return np.asarray(tokens)


def _logits(rows=5, vocab=11):
  rng = np.random.default_rng(0)
  return jnp.asarray(3 * rng.normal(size=(rows, vocab)), jnp.float32)


def _keys(rows=5):
  return jax.random.split(jax.random.key(0), rows)


class ChooseTokensTest(parameterized.TestCase):
  @parameterized.parameters(
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 5.0, "top_p": 1e-6},
    {"temperature": 1e-4},
  )
  def test_is_the_best_token(self, **options):
    tokens, _ = choose_tokens(_logits(), _keys(), **options)
    chex.assert_type(tokens, jnp.int32)
    np.testing.assert_array_equal(tokens, _logits().argmax(-1))

  def test_ties_of_the_best_go_to_the_lowest_id(self):
    tokens, _ = choose_tokens(jnp.array([[0.0, 2.0, 1.0, 2.0]]), _keys(1))
    self.assertEqual(int(tokens[0]), 1)

  @parameterized.parameters(
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 2.0, "top_k": 2, "top_p": 0.9},
  )
  def test_log_probabilities_are_those_of_the_model_itself(self, **options):
    tokens, log_probs = choose_tokens(_logits(), _keys(), **options)
    expected = np.asarray(jax.nn.log_softmax(_logits()))
    chex.assert_type(log_probs, jnp.float32)
    np.testing.assert_allclose(
      log_probs, expected[np.arange(5), tokens], rtol=1e-6
    )

  @parameterized.parameters(0.5, 1.0, 2.0)
  def test_samples_are_as_frequent_as_the_temperature_says(self, temperature):
    tokens = _sample(np.log(_PROBS), temperature=temperature)
    shares = np.bincount(tokens, minlength=4) / _SAMPLES
    expected = _PROBS ** (1 / temperature)
    expected /= expected.sum()
    # Five standard deviations of a share of this many samples.
    spread = 5 * np.sqrt(expected * (1 - expected) / _SAMPLES)
    np.testing.assert_array_less(np.abs(shares - expected), spread)

  @parameterized.parameters(
    ({"top_k": 2}, (1, 3)),
    ({"top_k": 3}, (1, 2, 3)),
    ({"top_k": 4}, (0, 1, 2, 3)),
    ({"top_k": 99}, (0, 1, 2, 3)),
    ({"top_p": 0.4}, (1,)),
    ({"top_p": 0.6}, (1, 3)),
    ({"top_p": 0.79}, (1, 3)),
    ({"top_p": 0.81}, (1, 2, 3)),
    ({"top_p": 0.96}, (0, 1, 2, 3)),
    # Of the two best, 0.625 and 0.375, the first reaches 0.6 alone.
    ({"top_k": 2, "top_p": 0.6}, (1,)),
    ({"top_k": 2, "top_p": 0.7}, (1, 3)),
  )
  def test_samples_all_tokens_that_are_kept_and_no_other(self, options, kept):
    tokens = _sample(np.log(_PROBS), temperature=1.0, **options)
    self.assertEqual(tuple(np.unique(tokens)), kept)

  def test_kept_tokens_keep_their_proportions(self):
    tokens = _sample(np.log(_PROBS), temperature=1.0, top_k=2)
    share = (tokens == 1).mean()
    self.assertAlmostEqual(share, 0.5 / 0.8, delta=5 * np.sqrt(0.24 / _SAMPLES))

  def test_temperature_is_applied_before_top_p(self):
    # At temperature 4 the best token has 0.5 ** 0.25 / 2.916 = 0.29 alone.
    tokens = _sample(np.log(_PROBS), temperature=4.0, top_p=0.4)
    self.assertEqual(tuple(np.unique(tokens)), (1, 3))

  @parameterized.parameters({}, {"top_k": 3}, {"top_p": 0.9})
  def test_masked_tokens_are_never_sampled(self, **options):
    tokens = _sample([0.0, -np.inf, 0.0, -np.inf], temperature=1.0, **options)
    self.assertEqual(tuple(np.unique(tokens)), (0, 2))

  def test_rows_are_sampled_by_their_keys_alone(self):
    logits, keys = jnp.zeros((5, 1000)), _keys()
    tokens, _ = choose_tokens(logits, keys, temperature=1.0)
    again, _ = choose_tokens(logits[2:4], keys[2:4], temperature=1.0)
    np.testing.assert_array_equal(again, tokens[2:4])
    self.assertLen(set(tokens.tolist()), 5)


if __name__ == "__main__":
  absltest.main()
