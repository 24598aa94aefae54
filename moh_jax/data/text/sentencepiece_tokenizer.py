"""Tokenizers of SentencePiece models, by the library `sentencepiece`."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence

from moh_jax.data.extras import import_extra
from moh_jax.data.text.special_tokens import (
  AddedToken,
  added_tokens,
  is_legacy,
  special_ids,
)
from moh_jax.data.text.tokenizer_files import TokenizerFileError

# A character that is in no vocabulary, so no piece reaches across it.
_ANCHOR = "\ue000"
_SPACES = (" ", "\u2581")  # the second is how SentencePiece writes the first


class SentencePieceTokenizer:
  """Tokenizer of a tokenizer.model file, with the tokens that files add."""

  kind = "sentencepiece"
  file_name = "tokenizer.model"

  def __init__(self, content: bytes, files: Mapping[str, bytes] | None = None):
    """Parses the content of a tokenizer.model.

    Args:
      content: of the file.
      files: beside it, see `tokenizer_files.py`.

    Raises:
      TokenizerFileError: the content is not a SentencePiece model, or the
        library is missing.
      ValueError: one of the files is damaged or names an unknown token.
    """
    try:
      library = import_extra("sentencepiece", "a SentencePiece model")
    except ValueError as error:
      raise TokenizerFileError(str(error)) from error
    try:
      self._processor = library.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
      raise TokenizerFileError(f"not a SentencePiece model: {error}") from error
    self.content, self.files = content, dict(files or {})
    self.sha256 = hashlib.sha256(content).hexdigest()
    pieces = self._processor.vocab_size()
    added = added_tokens(self.files)
    self._added = {t.id: t for t in added if t.id >= pieces}
    self._shown = {
      t.id: t.content for t in self._added.values() if not t.special
    }
    self.vocab_size = max([pieces - 1, *self._added]) + 1
    own = [
      AddedToken(i, self._processor.id_to_piece(i), special=True)
      for i in range(pieces)
      if self._processor.is_control(i) or self._processor.is_unknown(i)
    ]
    known = {t.content: t for t in (*own, *added)}
    always = [t for t in known.values() if not t.special]
    self._always = _Matcher(always) if always else None
    self._special = _Matcher(list(known.values()))
    self._legacy = is_legacy(self.files)
    ids = (self._processor.bos_id(), self._processor.eos_id())
    begin, end = (i if i >= 0 else None for i in ids)
    found = special_ids(
      self.files, self._token_to_id, (begin, end), begin is not None
    )
    self.bos_id, self.eos_id = found.bos_id, found.eos_id
    self.add_bos, self.stop_ids = found.add_bos, found.stop_ids

  def _token_to_id(self, token: str) -> int | None:
    found = self._processor.piece_to_id(token)
    if self._processor.id_to_piece(found) == token:
      return found
    return next(
      (t.id for t in self._added.values() if t.content == token), None
    )

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    if token in self._added:
      return self._added[token].content
    known = 0 <= token < self._processor.vocab_size()
    return self._processor.id_to_piece(token) if known else None

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    matcher = self._special if parse_special else self._always
    ids, end = [], 0
    for token, start, stop in matcher.find(text) if matcher else ():
      ids += [*self._part(text[end:start], end), token]
      end = stop
    return ids + self._part(text[end:], end)

  def _part(self, text: str, start: int) -> list[int]:
    """Encodes the text that begins at `start`, or after a special token."""
    if self._legacy or not (start or text.startswith(_SPACES)):
      return self._processor.encode(text)
    # The model would put a space before it.
    return self._processor.encode(_ANCHOR + text)[len(self._anchor) :]

  @functools.cached_property
  def _anchor(self) -> list[int]:
    return self._processor.encode(_ANCHOR)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    spaced = not self._legacy and any(t.startswith(_SPACES) for t in texts)
    if self._always is None and not spaced:
      return self._processor.encode(list(texts))  # on several cores
    return [self.encode(text) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    pieces, shown = self._processor.vocab_size(), self._shown
    text, known = "", []
    for token in (*map(int, ids), None):
      if token is not None and 0 <= token < pieces:
        known.append(token)
      elif token is None or token in shown:
        text += self._text(known, begins=not text) + shown.get(token, "")
        known = []
    return text

  def _text(self, ids: list[int], *, begins: bool) -> str:
    """Decodes pieces; the first space is dropped at the begin of a text."""
    if begins:
      return self._processor.decode(ids)
    before = self._processor.decode(self._anchor)
    return self._processor.decode([*self._anchor, *ids])[len(before) :]

  def __reduce__(self):
    return SentencePieceTokenizer, (self.content, self.files)


class _Matcher:
  """Finds tokens in a text, the longest first."""

  def __init__(self, tokens: Sequence[AddedToken]):
    self._tokens = sorted(tokens, key=lambda t: -len(t.content))
    self._pattern = re.compile(
      "|".join(
        (r"\s*" if t.lstrip else "")
        + f"({re.escape(t.content)})"
        + (r"\s*" if t.rstrip else "")
        for t in self._tokens
      )
    )

  def find(self, text: str) -> list[tuple[int, int, int]]:
    """Returns (id, start, stop) of each token in a text."""
    return [
      (self._tokens[m.lastindex - 1].id, m.start(), m.end())
      for m in self._pattern.finditer(text)
    ]
