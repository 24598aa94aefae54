"""What tokenizer files may ask of their libraries: bounds, errors in one line.

A normalizer or decoder of thirty rules that double a letter makes gigabytes of
a word, so the text that parts make of a character is bounded before any is
used.
"""

import base64
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import tokenizers as hf

from moh_jax.data.input_files import import_extra
from moh_jax.runtime.json_files import parse_json

_MOST_GROWTH = 64  # of a text by normalizing or decoding
# Characters of a word or piece, with which the time of a long word grows.
_MOST_WORD, _MOST_PIECE = 1 << 10, 1 << 8
# Characters that a Unicode normalization makes of one, at most.
_FORMS = {"NFD": 4.0, "NFC": 3.0, "NFKD": 18.0, "NFKC": 18.0}
# These write a character as four, or put one before each word or piece.
_KINDS = {**_FORMS, "ByteLevel": 4.0, "Metaspace": 2.0, "WordPiece": 2.0}
_PARTS = ("normalizers", "pretokenizers", "decoders")  # of a Sequence
_MOST_PARTS = 1 << 7  # of each of them
_MOST_TOKENS = (1 << 31) - 1
_MOST_AFFIX = 1 << 6  # characters that mark a piece inside or at a word's end
_MOST_STATE = 1 << 16  # characters of a post_processor


class _Token(msgspec.Struct):
  id: int
  content: str


class _Added(msgspec.Struct):
  added_tokens: list[_Token] = []


_ONE_TOKEN = hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a"))


class TokenizerFileError(ValueError):
  """A tokenizer's own file cannot be used, or its library is missing."""


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
  """Makes a TokenizerFileError of any error of a library of tokenizers."""
  try:
    yield
  except BaseException as error:
    # Panics of `tokenizers` are no Exceptions; nor are interrupts.
    if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
      raise
    raise TokenizerFileError(f"{what}: {error}") from error


def _check(name: str, growth: float) -> None:
  """Refuses a part that makes endless text of a short one."""
  if growth > _MOST_GROWTH:
    raise TokenizerFileError(
      f"its {name} may make {growth:.3g} characters of one, must be at most "
      f"{_MOST_GROWTH:,}"
    )


def _growth(part: Mapping[str, Any]) -> float:
  """Characters that a part of a tokenizer.json makes of one, at most."""
  kind = part["type"]
  if kind == "Sequence":
    parts = next(part[name] for name in _PARTS if name in part)
    # After one of these the others find little to take apart; more than one
    # table of rules may go on with what another made.
    tables = [x for x in parts if x["type"] == "Precompiled"]
    once = [x for x in parts if x["type"] in _FORMS] + tables[:1]
    others = [x for x in parts if x["type"] not in (*_FORMS, "Precompiled")]
    growth = math.prod(map(_growth, others + tables[1:]))
    return growth * max(map(_growth, once), default=1.0)
  if kind == "Replace":
    shortest = len(part["pattern"].get("String", ""))
    made = len(part["content"])
    return max(1.0, made / shortest) if shortest else 1.0 + made
  if kind == "Prepend":
    return 1.0 + len(part["prepend"])
  if kind == "Precompiled":
    return _longest_rule(base64.b64decode(part["precompiled_charsmap"]))
  # What stands for nothing is put between any two characters.
  if kind == "CTC" and not part["word_delimiter_token"]:
    return 2.0
  if kind == "BPEDecoder" and not part["suffix"]:
    return 2.0
  return _KINDS.get(kind, 1.0)


def _longest_rule(charsmap: bytes) -> float:
  """Bytes that SentencePiece's table of rules makes of a character, at most."""
  # The length of a trie, the trie, and texts that end with a null byte.
  texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
  return float(max(map(len, texts.split(b"\0"))))


def read_tokenizer_json(
  content: bytes, *, special_as_text: bool
) -> hf.Tokenizer:
  """Parses a tokenizer.json; its truncation, padding and dropout are left out.

  Args:
    content: of the file.
    special_as_text: text that looks like a special token is encoded as text.

  Raises:
    TokenizerFileError: it is none, or makes endless text or ids of a short one.
    ValueError: its tokens have not the ids that it says.
  """
  with library_errors("not a tokenizer.json"):
    tokenizer = hf.Tokenizer.from_str(content.decode())
  for name in ("normalizer", "pre_tokenizer", "decoder"):
    if part := getattr(tokenizer, name):
      state = part.__getstate__()
      if (count := state.count(b'"type"')) > _MOST_PARTS:
        raise TokenizerFileError(
          f"its {name} has {count} parts, must have at most {_MOST_PARTS}"
        )
      _check(name, _growth(json.loads(state)))
  part = tokenizer.post_processor
  if part and len(part.__getstate__()) > _MOST_STATE:
    raise TokenizerFileError(
      f"its post_processor has more than {_MOST_STATE:,} characters"
    )
  _check_model(tokenizer)
  _check_ids(tokenizer, content)
  tokenizer.encode_special_tokens = special_as_text
  tokenizer.no_truncation()
  tokenizer.no_padding()
  if getattr(tokenizer.model, "dropout", None):
    tokenizer.model.dropout = None  # of its training: equal texts, equal ids
  return tokenizer


def _check_model(tokenizer: hf.Tokenizer) -> None:
  """Refuses a model whose time grows with the square of a word."""
  model = tokenizer.model
  for name in ("continuing_subword_prefix", "end_of_word_suffix"):
    length = len(getattr(model, name, None) or "")
    if length > _MOST_AFFIX:
      raise TokenizerFileError(
        f"its {name} has {length:,} characters, must have at most {_MOST_AFFIX}"
      )
  longest = getattr(model, "max_input_chars_per_word", 0)  # of WordPiece
  if longest > _MOST_WORD:
    raise TokenizerFileError(
      f"its max_input_chars_per_word={longest:,} must be at most {_MOST_WORD:,}"
    )
  if isinstance(model, hf.models.Unigram):
    _check_pieces(tokenizer.get_vocab(with_added_tokens=False))


def _check_pieces(pieces: Iterable[str]) -> None:
  longest = max(map(len, pieces), default=0)
  if longest > _MOST_PIECE:
    raise TokenizerFileError(
      f"its Unigram model has a piece of {longest:,} characters, must be at "
      f"most {_MOST_PIECE:,}"
    )


def _check_ids(tokenizer: hf.Tokenizer, content: bytes) -> None:
  """Refuses tokens of one id, and added ones to which others are given.

  Texts of such ids would be read as the library's hash tables happen to lie.
  """
  names: dict[int, str] = {}
  for name, index in tokenizer.get_vocab().items():
    if index >= _MOST_TOKENS:
      raise ValueError(f"its token {name!r} has the id {index}, too large")
    if (other := names.setdefault(index, name)) != name:
      both = sorted((name, other))
      raise ValueError(f"its tokens {both} have one id, {index}")
  stored = parse_json(content, _Added, "it", len(content))
  for token in stored.get("added_tokens", ()):
    given = tokenizer.token_to_id(token["content"])
    if given not in (None, token["id"]):  # None of a token without text
      raise ValueError(
        f"its added token {token['content']!r} has the id {token['id']}, must "
        f"have {given}, which follows from the others"
      )


def special_ends(tokenizer: hf.Tokenizer) -> tuple[int | None, int | None]:
  """The special tokens that a post-processor puts around a text.

  Raises:
    ValueError: their ids are not those of the vocabulary, or it leaves the text
      out or repeats it.
  """
  with library_errors("its post_processor fails"):
    made = tokenizer.post_process(_ONE_TOKEN.encode("a"))
  for token, index, mask in zip(
    made.tokens, made.ids, made.special_tokens_mask
  ):
    if mask and (own := tokenizer.token_to_id(token)) != index:
      raise ValueError(
        f"its post_processor gives the token {token!r} the id {index}, the "
        f"vocabulary {own}"
      )
  ids = [i if m else None for i, m in zip(made.ids, made.special_tokens_mask)]
  if (count := ids.count(None)) != 1:
    raise ValueError(
      f"its post_processor writes a text {count:,} times, must write it once"
    )
  first, *others = ids
  return first, others[-1] if others else None


def check_rules(content: bytes) -> None:
  """Refuses a SentencePiece model that takes endless text or time.

  Raises:
    TokenizerFileError: it may.
  """
  proto = import_extra("sentencepiece.sentencepiece_model_pb2", "a model")
  model = proto.ModelProto.FromString(content)
  for name in ("normalizer_spec", "denormalizer_spec"):
    _check(name, _longest_rule(getattr(model, name).precompiled_charsmap))
  if model.trainer_spec.model_type == proto.TrainerSpec.UNIGRAM:
    _check_pieces(piece.piece for piece in model.pieces)
