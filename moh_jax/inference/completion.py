"""The text of a completion as its tokens come."""

import dataclasses
from collections.abc import Sequence

from moh_jax.data.tokenizers import StreamDecoder, Tokenizer
from moh_jax.inference.decoding import NO_TOKEN
from moh_jax.inference.options import Sampling


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
    self._stop_ids, self._stop = tokenizer.stop_ids, sampling.stop
    self._limit = sampling.max_new_tokens
    self._tokens: list[int] = []
    self._log_probs: list[float] = []
    self._text, self._given = "", 0
    self.finish_reason = ""

  def add(self, token: int, log_prob: float) -> None:
    """Adds the next token; tokens after the end of the text are ignored."""
    if self.finish_reason or token == NO_TOKEN:
      return
    self._tokens.append(token)
    self._log_probs.append(log_prob)
    if token in self._stop_ids:
      self._end("end", self._decoder.flush())
      return
    self._text += self._decoder.feed(token)
    if len(self._tokens) == self._limit:
      self._end("length", self._decoder.flush())
    else:
      self._cut()

  def _end(self, reason: str, rest: str) -> None:
    self._text += rest
    self._cut()
    self.finish_reason = self.finish_reason or reason

  def _cut(self) -> None:
    places = [self._text.find(text) for text in self._stop]
    if found := [place for place in places if place >= 0]:
      self._text, self.finish_reason = self._text[: min(found)], "stop"

  def new_text(self) -> str:
    """Text not given before; what may begin a stop text is held back."""
    end = len(self._text)
    if not self.finish_reason:
      end -= max((_overlap(self._text, stop) for stop in self._stop), default=0)
    piece = self._text[self._given : end]
    self._given = max(end, self._given)
    return piece

  def completion(self) -> Completion:
    """The whole."""
    return Completion(
      self._text,
      tuple(self._tokens),
      tuple(self._log_probs),
      self.finish_reason,
    )


def _overlap(text: str, stop: str) -> int:
  """Characters at the end of a text that a stop text begins with."""
  sizes = range(min(len(stop) - 1, len(text)), 0, -1)
  return next((n for n in sizes if text.endswith(stop[:n])), 0)
