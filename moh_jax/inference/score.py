"""How likely a language model finds given text.

Requests are turned into rows: requests that read the same tokens (choices of
one token after one context, windows that repeat) share a row and so a forward
pass. Rows of about the same length form batches of a few fixed shapes.

Shapes: B rows of a batch, N tokens they read, T places whose next token is
known, K tokens that are compared after the last place, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh

from moh_jax.config import LLMConfig
from moh_jax.layers.vocabulary import token_nats
from moh_jax.models.llm import output_kernel, output_logits
from moh_jax.runtime.batches import put_batch
from moh_jax.runtime.mesh import replicated, use_mesh

_MIN_LENGTH = 32  # of the shapes; shorter rows are filled up
# Rows that score so few places, as those of questions do, have logits of these
# alone: with a large vocabulary the output layer is a good part of the work.
_SHORT_TAIL = 16
_CHOICES = 16  # K
_IN_FLIGHT = 2  # batches: the device is busy while the host sums

Pair = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Score:
  """A continuation's score.

  Attributes:
    log_likelihood: nats, summed over its tokens.
    greedy: whether each of them is the most likely one.
    tokens: their number.
  """

  log_likelihood: float
  greedy: bool
  tokens: int


@dataclasses.dataclass
class _Row:
  """Tokens that a forward pass reads, and the requests it answers.

  Attributes:
    tokens: [n] int32.
    known: places before the last one that some request scores.
    choices: tokens compared after the last place, each with its column.
    requests: (number of the request, its tokens, column of the last one).
  """

  tokens: np.ndarray
  known: int = 0
  choices: dict[int, int] = dataclasses.field(default_factory=dict)
  requests: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

  def add(self, request: int, count: int, last: int) -> None:
    """Adds a request to score the row's last `count - 1` tokens and `last`."""
    column = self.choices.setdefault(last, len(self.choices))
    self.requests.append((request, count, column))
    self.known = max(self.known, count - 1)


class Scorer:
  """Scores continuations of contexts.

  Attributes:
    max_length: tokens that the model reads at most.
  """

  def __init__(
    self,
    model: nn.Module,
    params: Any,
    config: LLMConfig,
    *,
    batch_size: int,
    mesh: Mesh,
  ):
    """Prepares the programs; they compile at first use.

    Args:
      model: the network.
      params: its parameters, on the device or sharded over the mesh.
      config: its section.
      batch_size: rows of a forward pass, over all devices.
      mesh: devices that share the batch. In a run of several processes all of
        them score the same pairs.
    """
    self.max_length = config.max_length
    self._params = params
    self._batch_size, self._mesh = batch_size, mesh
    step = _make_step(model, config)
    self._step = jax.jit(step, out_shardings=replicated(mesh))

  def log_likelihoods(
    self, pairs: Sequence[Pair], progress: bool = False
  ) -> list[Score]:
    """Scores continuations.

    Args:
      pairs: token ids of contexts, at least one token each, and of their
        continuations. A context that is too long loses its beginning: the model
        reads the last `max_length` tokens before the last one of the pair.
      progress: show a bar on stderr.

    Returns:
      A score per pair, whatever the others are.

    Raises:
      ValueError: a continuation is longer than `max_length`; the pair's number
        is given.
    """
    results = [Score(0.0, True, 0)] * len(pairs)  # of empty continuations
    rows = self._rows(pairs)
    waiting: list[tuple[list[_Row], Any]] = []
    with tqdm.tqdm(
      total=len(pairs), unit="request", disable=not progress, smoothing=0.1
    ) as bar:
      bar.update(len(pairs) - sum(len(row.requests) for row in rows))
      for batch, length, places in self._batches(rows):
        waiting.append((batch, self._run(batch, length, places)))
        if len(waiting) == _IN_FLIGHT:
          bar.update(_collect(*waiting.pop(0), results))
      for one in waiting:
        bar.update(_collect(*one, results))
    return results

  def rolling(
    self, tokens: Sequence[int], prefix_id: int
  ) -> list[tuple[list[int], list[int]]]:
    """Cuts a text into pairs that score each of its tokens once.

    The windows have `max_length` tokens and one token of context; the last one
    has as much context as fits.

    Args:
      tokens: of the text.
      prefix_id: stands before it.

    Returns:
      Contexts and continuations; none of an empty text.
    """
    tokens, size = [prefix_id, *tokens], self.max_length
    pairs = []
    for start in range(1, len(tokens), size):
      stop = min(start + size, len(tokens))
      first = max(stop - size - 1, 0)
      pairs.append((tokens[first:start], tokens[start:stop]))
    return pairs

  def _rows(self, pairs: Sequence[Pair]) -> list[_Row]:
    """Checks the pairs and groups them by what they read."""
    limit = self.max_length
    rows: dict[bytes, list[_Row]] = {}
    for index, (context, continuation) in enumerate(pairs):
      if len(continuation) > limit:
        raise ValueError(
          f"the continuation of pair {index} has {len(continuation)} tokens, "
          f"more than model.max_length={limit}"
        )
      if not len(continuation):
        continue
      ids = np.array([*context, *continuation], np.int32)[-(limit + 1) :]
      same = rows.setdefault(ids[:-1].tobytes(), [])
      last = int(ids[-1])
      if not same or (
        last not in same[-1].choices and len(same[-1].choices) == _CHOICES
      ):
        same.append(_Row(ids[:-1]))
      same[-1].add(index, len(continuation), last)
    return [row for same in rows.values() for row in same]

  def _batches(
    self, rows: Sequence[_Row]
  ) -> Iterator[tuple[list[_Row], int, int]]:
    """Rows of one shape, N and T; the largest first, which need most memory."""
    shapes: dict[tuple[int, int], list[_Row]] = {}
    for row in rows:
      length = _length_of_shape(len(row.tokens), self.max_length)
      places = length if row.known > _SHORT_TAIL else min(_SHORT_TAIL, length)
      shapes.setdefault((length, places), []).append(row)
    for length, places in sorted(shapes, reverse=True):
      group = shapes[length, places]
      for start in range(0, len(group), self._batch_size):
        yield group[start : start + self._batch_size], length, places

  def _run(self, batch: Sequence[_Row], length: int, places: int) -> Any:
    """Starts a forward pass over rows, filled up to the batch size."""
    size = self._batch_size
    shapes = (size, length), (size,), (size, places), (size,), (size, _CHOICES)
    arrays = [np.zeros(shape, np.int32) for shape in shapes]
    tokens, firsts, targets, lasts, choices = arrays
    for i, row in enumerate(batch):
      count = len(row.tokens)
      firsts[i] = first = _first_place(count, places)
      tokens[i, :count] = row.tokens
      targets[i, : count - 1 - first] = row.tokens[first + 1 :]
      lasts[i] = count - 1
      choices[i, : len(row.choices)] = list(row.choices)
    arrays = [put_batch(array, self._mesh) for array in arrays]
    with use_mesh(self._mesh):
      return self._step(self._params, *arrays)


def _make_step(model: nn.Module, config: LLMConfig):
  """The forward pass."""

  def step(
    params: Any,
    tokens: jax.Array,
    firsts: jax.Array,
    targets: jax.Array,
    lasts: jax.Array,
    choices: jax.Array,
  ) -> tuple[jax.Array, ...]:
    """Scores a batch.

    Rows are filled up on the right: no token sees those after it.

    Args:
      params: of the model.
      tokens: [B, N] int32.
      firsts: [B] int32, the first of the T places.
      targets: [B, T] int32 tokens that follow them.
      lasts: [B] int32, the last place.
      choices: [B, K] int32 tokens compared after it.

    Returns:
      Nats [B, T] float32 of the targets and whether they are the most likely
      tokens [B, T] bool; the same of the choices, [B, K].
    """
    # Padding has the last token's position: "dynamic" scales the rotation of
    # all by the largest.
    places = jnp.minimum(jnp.arange(tokens.shape[1])[None], lasts[:, None])
    x, _ = model.apply(
      {"params": params}, tokens, positions=places, with_logits=False
    )
    last = jnp.take_along_axis(x, lasts[:, None, None], axis=1)[:, 0]  # [B, C]
    if targets.shape[1] < tokens.shape[1]:
      places = firsts[:, None] + jnp.arange(targets.shape[1])[None]
      x = jnp.take_along_axis(x, places[..., None], axis=1)  # [B, T, C]
    kernel = output_kernel(params, config)
    nats, likeliest = token_nats(x, kernel, targets, config.loss_chunk)
    logits = output_logits(last, kernel)  # [B, V]
    picked = jnp.take_along_axis(logits, choices, axis=1)  # [B, K]
    choice_nats = jax.nn.logsumexp(logits, axis=1)[:, None] - picked
    best = picked >= logits.max(1)[:, None]
    return nats, likeliest, choice_nats, best

  return step


def _collect(batch: Sequence[_Row], outputs: Any, results: list[Score]) -> int:
  """Sums a batch's outputs into its requests' results; returns their number."""
  nats, likeliest, choice_nats, best = (
    np.asarray(x.addressable_data(0)) for x in outputs
  )
  done = 0
  for i, row in enumerate(batch):
    count = len(row.tokens)
    stop = count - 1 - _first_place(count, nats.shape[1])
    for request, number, column in row.requests:
      part = slice(stop - (number - 1), stop)
      total = nats[i, part].sum(dtype=np.float64) + choice_nats[i, column]
      if not math.isfinite(total):
        raise FloatingPointError("the model gives NaN or infinite likelihoods")
      greedy = likeliest[i, part].all() and best[i, column]
      results[request] = Score(-float(total), bool(greedy), number)
      done += 1
  return done


def _first_place(count: int, places: int) -> int:
  """Index of the first of the `places` positions before the last token."""
  return max(0, count - 1 - places)


def _length_of_shape(count: int, limit: int) -> int:
  """The power of two that holds so many tokens, at most `limit`."""
  return min(max(_MIN_LENGTH, 1 << (count - 1).bit_length()), limit)
