"""What text generation computes: prompts read, tokens chosen, their text."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig
from moh_jax.config.llm import Sampling
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.layers.partitioning import constrain
from moh_jax.models.llm import LLM, unrolled_logits
from moh_jax.ops.cache import Slots, merge_texts
from moh_jax.ops.target import on_one_device, target

_MIN_TEMPERATURE = 1e-6  # lower ones are raised to it: it gives the best token
# A character has at most 4 tokens, but several tokens in a row may each end
# inside one. Text that is incomplete for longer than this is not UTF-8.
_MAX_HELD = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
  """The state of a batch of texts between two decoding steps.

  Attributes:
    cache: of the model; on a CPU its texts are merged, see `merge_texts`.
    slot: [] int32 that the next token is written to.
    padding: [B] int32 empty slots before each text.
    logits: [B, V] float32 of the next token.
    finished: [B] bool, rows that ended or are padding of the batch.
    rows: [B] int32 places in the call's prompts, for the random keys.
    written: [] int32 tokens after the prompts.
  """

  cache: Any
  slot: jax.Array
  padding: jax.Array
  logits: jax.Array
  finished: jax.Array
  rows: jax.Array
  written: jax.Array


def make_prefill(model: LLM, cache_dtype: str) -> Any:
  """Jitted: reads prompts into a new cache.

  Args:
    model: with unrolled layers.
    cache_dtype: of keys and values.

  Returns:
    (params, tokens [B, P], padding [B], rows [B], finished [B], slots) ->
    Decoding; `slots` is static. Prompts end with the last of the P tokens.
  """
  config = model.config

  @functools.partial(jax.jit, static_argnums=5)
  def prefill(params, tokens, padding, rows, finished, slots):
    batch, length = tokens.shape
    cache = model.new_cache(batch, slots, cache_dtype)
    place = jnp.arange(length)[None] - padding[:, None]
    x, _, cache = model.apply(
      {"params": params},
      tokens,
      jax.tree.map(_split_cache, cache),
      Slots(jnp.int32(0)),
      positions=jnp.maximum(place, 0),
      token_mask=place >= 0,
      with_logits=False,
      method="extend",
    )
    logits = _next_logits(params, config, x)
    if target().platform == "cpu" and on_one_device():
      cache = merge_texts(cache)
    slot, written = jnp.int32(length), jnp.int32(0)
    return Decoding(cache, slot, padding, logits, finished, rows, written)

  return prefill


def make_decode(model: LLM, stop_ids: tuple[int, ...], span: int) -> Any:
  """Jitted: writes up to `span` tokens a row.

  Args:
    model: with unrolled layers.
    stop_ids: tokens that end a text, each of them.
    span: tokens a call writes at most.

  Returns:
    (params, Decoding, numbers, greedy, cut) -> (Decoding, tokens [B, span]
    int32, log-probabilities [B, span] float32). `span_numbers` makes `numbers`;
    the last two are static, see `choose_tokens`. It ends early when all rows
    have ended; what stands after a text's end means nothing.
  """
  stops = np.asarray(stop_ids, np.int32)

  @functools.partial(jax.jit, static_argnums=(3, 4), donate_argnums=1)
  def decode(
    params, state, numbers, greedy, cut
  ) -> tuple[Decoding, jax.Array, jax.Array]:
    batch = state.rows.shape[0]
    key = jax.random.key(numbers["seed"])
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, state.rows)

    def one(carry):
      step, state, tokens, log_probs = carry
      fold = jax.vmap(jax.random.fold_in, (0, None))
      keys = fold(row_keys, state.written)
      chosen, log_prob = choose_tokens(
        state.logits, keys, numbers, greedy=greedy, cut=cut
      )
      tokens = tokens.at[:, step].set(chosen)
      log_probs = log_probs.at[:, step].set(log_prob)
      ended = (chosen[:, None] == stops[None]).any(-1)
      x, _, cache = model.apply(
        {"params": params},
        chosen[:, None],
        state.cache,
        Slots(state.slot, state.padding),
        positions=(state.slot - state.padding)[:, None],
        with_logits=False,
        method="extend",
      )
      state = dataclasses.replace(
        state,
        cache=cache,
        slot=state.slot + 1,
        logits=_next_logits(params, model.config, x),
        finished=state.finished | ended,
        written=state.written + 1,
      )
      return step + 1, state, tokens, log_probs

    def unfinished(carry):
      step, state, *_ = carry
      return (step < numbers["count"]) & ~state.finished.all()

    start = (
      jnp.int32(0),
      state,
      jnp.zeros((batch, span), jnp.int32),
      jnp.zeros((batch, span), jnp.float32),
    )
    return jax.lax.while_loop(unfinished, one, start)[1:]

  return decode


def span_numbers(sampling: Sampling, count: int) -> dict[str, np.generic]:
  """Traced arguments of a span: other values need no new compilation.

  Args:
    sampling: how tokens are sampled.
    count: tokens wanted, at most the span.
  """
  return {
    "seed": np.uint32(sampling.seed),
    "count": np.int32(count),
    "temperature": np.float32(sampling.temperature),
    "top_k": np.int32(sampling.top_k),
    "top_p": np.float32(sampling.top_p),
  }


def _next_logits(params: Any, config: LLMConfig, x: jax.Array) -> jax.Array:
  logits = unrolled_logits(x[:, -1], params, config)
  return constrain(logits, "batch", "vocab")


def _split_cache(x: jax.Array) -> jax.Array:
  """Keys and values: batch and heads over the mesh."""
  return constrain(x, "batch", "heads", *[None] * (x.ndim - 2))


def choose_tokens(
  logits: jax.Array,
  keys: jax.Array,
  numbers: Mapping[str, Any],
  *,
  greedy: bool,
  cut: bool,
) -> tuple[jax.Array, jax.Array]:
  """Samples a token for every row.

  Logits are divided by the temperature, cut to the `top_k` best, and then to
  the fewest best whose probabilities reach `top_p` (arXiv:1904.09751).

  Args:
    logits: [B, V] float32.
    keys: [B] random keys, one per row.
    numbers: "temperature", "top_k" and "top_p" of a `Sampling`, maybe traced.
    greedy: whether the temperature is 0: the best token, the lowest id of equal
      ones.
    cut: whether `top_k` or `top_p` excludes tokens.

  Returns:
    tokens [B] int32; and their log-probabilities [B] float32 in the model's own
    distribution, at temperature 1 and without any cut.
  """
  if greedy:
    tokens = _best(logits)
  else:
    centred = logits - logits.max(-1, keepdims=True)
    scaled = centred / jnp.maximum(numbers["temperature"], _MIN_TEMPERATURE)
    if cut:
      scaled = _cut(scaled, numbers["top_k"], numbers["top_p"])
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen


def _best(logits: jax.Array) -> jax.Array:
  """The lowest id of the largest logit; `argmax` is scalar code on CPUs."""
  last = logits.shape[-1] - 1
  ids = jnp.arange(last + 1)
  return jnp.where(logits == logits.max(-1, keepdims=True), ids, last).min(-1)


def _cut(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
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


@dataclasses.dataclass(frozen=True)
class Completion:
  """What was written after a prompt.

  Attributes:
    text: what follows the prompt's text, with the space between them; without
      the token that ended it and without the stop text.
    tokens: ids, the token that ended it and those of the stop text included.
    log_probs: natural logarithms of their probabilities under the model.
    finish_reason: "length" (max_new_tokens), "end" (one of the tokenizer's
      `stop_ids`) or "stop" (a stop text).
  """

  text: str
  tokens: tuple[int, ...]
  log_probs: tuple[float, ...]
  finish_reason: str


class CompletionWriter:
  """Text of one completion as its tokens come."""

  def __init__(
    self, tokenizer: Tokenizer, sampling: Sampling, prompt: Sequence[int] = ()
  ):
    self._decoder = StreamDecoder(tokenizer, prompt)
    self._stop_ids = tokenizer.stop_ids
    self._stop = [text for text in sampling.stop if text]  # "" ends no text
    self._limit = sampling.max_new_tokens
    self._tokens: list[int] = []
    self._log_probs: list[float] = []
    self._text, self._given = "", 0
    self.finish_reason = ""

  def add(self, token: int, log_prob: float) -> None:
    """Adds the next token; tokens after the end of the text are ignored."""
    if self.finish_reason:
      return
    if not math.isfinite(log_prob):
      raise FloatingPointError(f"the model's probabilities are {log_prob}")
    self._tokens.append(token)
    self._log_probs.append(log_prob)
    reason = "length" if len(self._tokens) == self._limit else ""
    if token in self._stop_ids:
      reason = "end"
    else:
      self._text += self._decoder.feed(token)
    if reason:
      self._text += self._decoder.flush()
    places = [self._text.find(text) for text in self._stop]
    if found := [place for place in places if place >= 0]:
      self._text, reason = self._text[: min(found)], "stop"
    self.finish_reason = reason

  def new_text(self) -> str:
    """Text not given before; what may begin a stop text is held back."""
    end = len(self._text)
    if not self.finish_reason:
      end -= max((_overlap(self._text, stop) for stop in self._stop), default=0)
    piece = self._text[self._given : end]
    self._given = max(end, self._given)
    return piece

  def completion(self) -> Completion:
    """The text so far; whole once `finish_reason` is set."""
    tokens, log_probs = tuple(self._tokens), tuple(self._log_probs)
    return Completion(self._text, tokens, log_probs, self.finish_reason)


def _overlap(text: str, stop: str) -> int:
  """Characters at the end of a text that a stop text begins with."""
  sizes = range(min(len(stop) - 1, len(text)), 0, -1)
  return next((n for n in sizes if text.endswith(stop[:n])), 0)


class StreamDecoder:
  """Decodes ids one by one, and returns whole characters only.

  All that `feed` and `flush` return, joined, is what `decode` of all ids has
  more than `decode` of those before them.
  """

  def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
    """Begins a text, or goes on with one.

    Args:
      tokenizer: of the ids.
      before: ids before the first one.
    """
    self._tokenizer = tokenizer
    # Ids whose text was returned, then those that are held back.
    self._ids = list(before)
    self._returned = len(self._ids)  # how many of `_ids` are of the first kind

  def feed(self, token: int) -> str:
    """Takes the next id and returns the text that it completes, often ""."""
    self._ids.append(int(token))
    text = self._tokenizer.decode(self._ids)
    held = len(self._ids) - self._returned
    if text.endswith("\ufffd") and held < _MAX_HELD:
      return ""
    return self._take(text)

  def flush(self) -> str:
    """Returns the text held back, with U+FFFD for incomplete characters."""
    return self._take(self._tokenizer.decode(self._ids))

  def _take(self, text: str) -> str:
    known = self._tokenizer.decode(self._ids[: self._returned])
    while not text.startswith(known):  # it ended in the middle of a character
      known = known[:-1]
    new = text[len(known) :]
    # Decoding may drop a space at the beginning of a text, so new ids are
    # decoded after earlier ones that begin it, with more than spaces.
    if new.strip(" "):
      self._ids = self._ids[self._returned :]
    self._returned = len(self._ids)
    return new
