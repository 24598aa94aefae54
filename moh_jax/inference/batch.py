"""A batch of texts that are written at one time, and the prompts that wait."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import LLMConfig
from moh_jax.config.llm import Sampling
from moh_jax.inference import decoding
from moh_jax.runtime import sharding

_SMALLEST_BUCKET = 16
# Of the rows, the part that has to end before prompts join: reading a few at a
# time takes less than as many times one.
_JOINING = 4
# A prefix is read once if it has as many tokens, a multiple of them, ...
_PREFIX = 32
# ... and no more than this follows: it attends without blocks.
_LONGEST_REST = 256


@dataclasses.dataclass(frozen=True)
class Programs:
  """What reads and writes texts.

  Attributes:
    config: the model section.
    params: for decoding.
    prefill: of `decoding.make_prefill`.
    decode: of `decoding.make_decode`.
    mesh: of the parameters.
    shares: whether prompts may attend to a prefix in a cache: not to one that
      is rounded, as their own tokens are not, or whose angles depend on what
      follows ("dynamic").
  """

  config: LLMConfig
  params: Any
  prefill: Any
  decode: Any
  mesh: Mesh
  shares: bool


class Batch:
  """Texts of one call: some are written, the others wait for a row.

  All rows write the same slot of the cache at the same time. A text that joins
  is put before that slot, and the slots that no text needs any more are
  forgotten when the cache is full.
  """

  def __init__(
    self,
    programs: Programs,
    prompts: Sequence[list[int]],
    writers: Sequence[decoding.CompletionWriter],
    sampling: Sampling,
    *,
    size: int,
    first: int,
    span: int,
  ):
    """Reads the first prompts.

    Args:
      programs: of the model.
      prompts: ids of each text.
      writers: of the same texts.
      sampling: how tokens are sampled.
      size: texts that are written at one time, at most.
      first: number of the first prompt, for the random keys.
      span: tokens that `write` adds at most.
    """
    self._programs, self._sampling = programs, sampling
    self._prompts, self._writers = prompts, writers
    self._first, self._span = first, span
    # The longest come first: those that follow fit where these end.
    waiting = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    self._rows, self._waiting = waiting[:size], waiting[size:]
    self._spare = span if self._waiting else 0
    self._prefix, self._common = None, 0
    if programs.shares and len(prompts) > 1:
      self._read_prefix()
    self._start()

  def _start(self) -> None:
    """Reads the prompts of all rows into a new cache."""
    self._state = None  # its memory is for the new one
    texts, programs = self._rows + self._waiting, self._programs
    rows = batch_bucket(len(self._rows), programs.config)
    self._slots = self._needed(texts)
    self._slot = length_bucket(len(self._prompts[texts[0]]))
    self._state = self._read(self._rows, rows, self._slot, self._slots)

  def write(self) -> None:
    """Adds tokens to every text, and lets those that wait take free rows."""
    programs, sampling, size = self._programs, self._sampling, len(self._rows)
    joining = max(1, size // _JOINING)
    ended = self._state.rows.size - size + (joining if self._waiting else size)
    count = min(self._span, self._slots - self._slot)
    numbers = decoding.span_numbers(sampling, count, ended)
    with sharding.use_mesh(programs.mesh):
      self._state, *new = programs.decode(
        programs.params, self._state, numbers, sampling.greedy, sampling.cut
      )
    slot, *new = sharding.gather([self._state.slot, *new])
    self._slot = int(slot)
    for i, *row in zip(self._rows, *new):
      for token, log_prob in zip(*row):
        self._writers[i].add(int(token), float(log_prob))
    if any(map(self._goes_on, self._rows)):
      self._refill(joining)
    elif self._waiting:
      self._rows, self._waiting = self._waiting[:size], self._waiting[size:]
      self._start()

  def _refill(self, usual: int) -> None:
    """Frees slots, and reads prompts into the rows of texts that ended."""
    free = [r for r, i in enumerate(self._rows) if not self._goes_on(i)]
    joining = dict(zip(free, self._waiting))
    self._waiting = self._waiting[len(joining) :]
    stay = [i for i in self._rows if self._goes_on(i)]
    ends = [len(self._prompts[i]) + self._writers[i].count for i in stay]
    longest = max((len(self._prompts[i]) for i in joining.values()), default=0)
    needed = max([length_bucket(longest) if joining else 0, *ends])
    slots = self._needed([*stay, *joining.values(), *self._waiting])
    slots = min(slots, self._slots)
    is_full = self._slot + (self._span if joining else 1) > self._slots
    moves = needed < self._slot if is_full else self._slot < needed
    if slots < self._slots or moves:
      shift = np.int32(self._slot - needed)
      with sharding.use_mesh(self._programs.mesh):
        self._state = decoding.move(self._state, shift, slots)
      self._slot, self._slots = needed, slots
    rows = list(joining)
    for start in range(0, len(rows), usual):  # one program for any number
      self._join(
        {row: joining[row] for row in rows[start : start + usual]}, usual
      )

  def _join(self, joining: dict[int, int], usual: int) -> None:
    """Reads prompts, which take rows: texts by row."""
    longest = max(len(self._prompts[i]) for i in joining.values())
    length = _power(longest)
    length = length if length <= self._slot else length_bucket(longest)
    read = self._read(list(joining.values()), _power(usual), length, length)
    source = np.full(self._state.rows.size, read.rows.size, np.int32)
    source[list(joining)] = np.arange(len(joining))
    source = sharding.put_batch(source, self._programs.mesh)
    with sharding.use_mesh(self._programs.mesh):
      self._state = decoding.join(self._state, read, source)
    for row, i in joining.items():
      self._rows[row] = i

  def _goes_on(self, text: int) -> bool:
    return not self._writers[text].finish_reason

  def _needed(self, texts: Sequence[int]) -> int:
    """Slots with which each of the texts can be written to its end."""
    longest = max(length_bucket(len(self._prompts[i])) for i in texts)
    return length_bucket(longest + self._sampling.max_new_tokens + self._spare)

  def _read(
    self,
    texts: Sequence[int],
    rows: int,
    length: int,
    slots: int,
    tokens: int | None = None,
  ) -> decoding.Decoding:
    """Reads prompts, or their first tokens: they end at slot `length`."""
    programs = self._programs
    prompts = [self._prompts[i][:tokens] for i in texts]
    window, prefix = length, None
    if self._prefix is not None:
      rest = length_bucket(max(map(len, prompts)) - self._common)
      if rest <= min(self._common, _LONGEST_REST, length):
        window, prefix = rest, self._prefix
    rows = len(sharding.pad_to_shards(np.zeros(rows), programs.mesh))
    read = np.zeros((rows, window), np.int32)
    padding = np.full(rows, length - 1, np.int32)
    numbers = np.zeros(rows, np.int32)
    for row, ids in enumerate(prompts):
      new = ids[-window:]
      read[row, window - len(new) :] = new
      padding[row] = length - len(ids)
      numbers[row] = self._first + texts[row]
    finished = np.arange(rows) >= len(texts)
    inputs = read, padding, numbers, finished
    inputs = [sharding.put_batch(x, programs.mesh) for x in inputs]
    with sharding.use_mesh(programs.mesh):
      return programs.prefill(programs.params, *inputs, slots, length, prefix)

  def _read_prefix(self) -> None:
    """Reads what all prompts begin with, if that is long."""
    equal = (len(set(tokens)) == 1 for tokens in zip(*self._prompts))
    shared = sum(itertools.takewhile(bool, equal))
    shared = min(shared, min(map(len, self._prompts)) - 1)
    shared -= shared % _PREFIX
    if shared:
      self._prefix = self._read([0], 1, shared, shared, shared).cache
      self._common = shared


def batch_bucket(texts: int, config: LLMConfig) -> int:
  """Batch size that `texts` prompts are padded to."""
  on_cpu = jax.devices()[0].platform == "cpu"
  # A single row is a matrix-vector product, which XLA keeps off the CPU's
  # bfloat16 units: two rows take a fraction of its time.
  smallest = 2 if on_cpu and config.dtype == "bfloat16" else 1
  return max(smallest, _power(texts))


def length_bucket(tokens: int) -> int:
  """Slots for so many tokens: 4 to 7 times a power of two, at most 1/4 free.

  Every token that is written reads all slots, and every bucket is a program.
  """
  step = max(4, _power(tokens) // 8)
  return max(_SMALLEST_BUCKET, -(-tokens // step) * step)


def _power(size: int) -> int:
  """The power of two that is at least `size`."""
  return 1 << (size - 1).bit_length()
