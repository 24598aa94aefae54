"""Text of ids that come one by one."""

from collections.abc import Sequence

from moh_jax.data.text.tokenizers import Tokenizer


class StreamDecoder:
  """Decodes ids one by one, and returns whole characters only.

  All that `feed` and `flush` return, joined, is what `decode` of all ids has
  more than `decode` of those before them.
  """

  # A character has at most 4 tokens, but several tokens in a row may each end
  # inside one. Text that is incomplete for longer than this is not UTF-8.
  _MAX_HELD = 16

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
    if text.endswith("\ufffd") and held < self._MAX_HELD:
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
