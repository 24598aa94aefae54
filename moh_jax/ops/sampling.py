"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp

_MIN_TEMPERATURE = 1e-6  # lower ones are raised to it: it gives the best token


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
  """Samples a token for every row.

  Logits are divided by the temperature, cut to the `top_k` best, and then to
  the fewest best whose probabilities reach `top_p` (arXiv:1904.09751).

  Args:
    logits: [B, V] float32.
    keys: [B] random keys, one per row.
    temperature: 0 takes the best token, the lowest id of equal ones.
    top_k: number of tokens kept; 0 keeps all.
    top_p: probability kept, in (0, 1].
    greedy: whether the temperature is 0; None reads `temperature`. If this
      and `cut` are given, the three options above may be traced arrays.
    cut: whether `top_k` or `top_p` excludes tokens; None reads them.

  Returns:
    tokens [B] int32; and their log-probabilities [B] float32 in the model's own
    distribution, at temperature 1 and without any cut.
  """
  greedy = temperature == 0 if greedy is None else greedy
  cut = bool(top_k) or top_p < 1 if cut is None else cut
  if greedy:
    tokens = _best(logits)
  else:
    centred = logits - logits.max(-1, keepdims=True)
    scaled = centred / jnp.maximum(temperature, _MIN_TEMPERATURE)
    if cut:
      scaled = _cut(scaled, top_k, top_p)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen


def _best(logits: jax.Array) -> jax.Array:
  """The lowest id of the largest logit; `argmax` is scalar code on CPUs."""
  last = logits.shape[-1] - 1
  ids = jnp.arange(last + 1)
  return jnp.where(logits == logits.max(-1, keepdims=True), ids, last).min(-1)


def _cut(
  logits: jax.Array, top_k: int | jax.Array, top_p: float | jax.Array
) -> jax.Array:
  """Sets all logits but the best to -inf; ties with the last kept one stay."""
  ranked = jnp.sort(logits, axis=-1, descending=True)
  size = logits.shape[-1]
  rank = jnp.arange(size)[None]
  kept = rank < jnp.where(jnp.asarray(top_k) > 0, top_k, size)
  probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
  better = jnp.cumsum(probs, axis=-1) - probs  # probability of better tokens
  kept = kept & (better < top_p)
  # The best token is always kept, whatever the rounding of the sums.
  last = jnp.maximum(kept.sum(-1, keepdims=True), 1) - 1
  lowest = jnp.take_along_axis(ranked, last, axis=-1)
  return jnp.where(logits >= lowest, logits, -jnp.inf)
