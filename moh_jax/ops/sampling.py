"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp


def choose_tokens(
  logits: jax.Array,
  keys: jax.Array,
  *,
  temperature: float = 0.0,
  top_k: int = 0,
  top_p: float = 1.0,
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

  Returns:
    tokens [B] int32; and their log-probabilities [B] float32 under the model
    itself, whatever they were drawn by.
  """
  if temperature == 0:
    tokens = logits.argmax(-1)
  else:
    scaled = logits / temperature
    if top_k or top_p < 1:
      scaled = _cut(scaled, top_k, top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen


def _cut(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
  """Puts all but the best logits to -inf."""
  ranked = jnp.sort(logits, axis=-1, descending=True)
  size = logits.shape[-1]
  kept = jnp.arange(size) < (min(top_k, size) if top_k else size)
  if top_p < 1:
    probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    before = jnp.cumsum(probs, axis=-1) - probs  # of the better ones
    kept = kept & (before < top_p)
  # The best one always stays, whatever rounding does to its sum.
  last = jnp.maximum(kept.sum(-1, keepdims=True), 1) - 1
  lowest = jnp.take_along_axis(ranked, last, axis=-1)
  return jnp.where(logits >= lowest, logits, -jnp.inf)
