"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp

_LOWEST_TEMPERATURE = 1e-6  # below it, the best token as at 0


def choose_tokens(
  logits: jax.Array,
  keys: jax.Array,
  *,
  temperature: float | jax.Array = 0.0,
  top_k: int | jax.Array = 0,
  top_p: float | jax.Array = 1.0,
  greedy: bool | None = None,
  cut: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Draws a token for every row.

  Logits are divided by the temperature, cut to the `top_k` best, and then to
  the fewest best whose probabilities reach `top_p` (arXiv:1904.09751).

  Args:
    logits: [B, V] float32.
    keys: [B] random keys, one a row.
    temperature: 0 takes the best token, ties the lowest id.
    top_k: tokens kept; 0 keeps all.
    top_p: probability kept, in (0, 1].
    greedy: whether the temperature is 0; None asks it. The three above may be
      traced where this and `cut` are given.
    cut: whether `top_k` or `top_p` leaves tokens out; None asks them.

  Returns:
    tokens [B] int32; and their log-probabilities [B] float32 under the model
    itself, whatever they were drawn by.
  """
  greedy = temperature == 0 if greedy is None else greedy
  cut = bool(top_k) or top_p < 1 if cut is None else cut
  if greedy:
    tokens = logits.argmax(-1)
  else:
    centred = logits - logits.max(-1, keepdims=True)
    scaled = centred / jnp.maximum(temperature, _LOWEST_TEMPERATURE)
    if cut:
      scaled = _cut(scaled, top_k, top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen


def _cut(
  logits: jax.Array, top_k: int | jax.Array, top_p: float | jax.Array
) -> jax.Array:
  """Puts all but the best logits to -inf."""
  ranked = jnp.sort(logits, axis=-1, descending=True)
  size = logits.shape[-1]
  rank = jnp.arange(size)[None]
  kept = rank < jnp.where(jnp.asarray(top_k) > 0, top_k, size)
  probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
  before = jnp.cumsum(probs, axis=-1) - probs  # of the better ones
  kept = kept & (before < top_p)
  # The best one always stays, whatever rounding does to its sum.
  last = jnp.maximum(kept.sum(-1, keepdims=True), 1) - 1
  lowest = jnp.take_along_axis(ranked, last, axis=-1)
  return jnp.where(logits >= lowest, logits, -jnp.inf)
