"""What the files beside a tokenizer say of begin, end and added tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from moh_jax.data.text.tokenizer_files import (
  ADDED_TOKENS,
  GENERATION_CONFIG,
  SPECIAL_TOKENS,
  TOKENIZER_CONFIG,
  read_json,
)

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
# Names of begin and end of text, for tokenizers that come without any file that
# says them. The first pair with a known token is used.
_BEGIN_END = (
  (BEGIN, END),
  ("<s>", "</s>"),
  ("<bos>", "<eos>"),
  ("[BOS]", "[EOS]"),
  ("<|startoftext|>", "<|endoftext|>"),
)
_NAMED = tuple(
  f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_STOPS = "eos_token_id"

Ids = tuple[int | None, int | None]  # of begin and end of text


@dataclasses.dataclass(frozen=True)
class SpecialIds:
  """The tokens that begin and end texts.

  Attributes:
    bos_id: id of the begin of text, or None.
    eos_id: id of the end of text, which ends documents, or None.
    add_bos: whether texts begin with `bos_id`.
    stop_ids: ids that end a generated text, `eos_id` among them.
  """

  bos_id: int | None
  eos_id: int | None
  add_bos: bool
  stop_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AddedToken:
  """A token that is matched in the text before the text is split.

  Attributes:
    id: of the token.
    content: its text.
    special: whether it is matched only where special tokens are parsed, and
      left out of decoded text.
    lstrip: whether spaces before it belong to it.
    rstrip: whether spaces after it belong to it.
  """

  id: int
  content: str
  special: bool = False
  lstrip: bool = False
  rstrip: bool = False


def special_ids(
  files: Mapping[str, bytes],
  token_to_id: Callable[[str], int | None],
  own: Ids,
  adds_bos: bool,
) -> SpecialIds:
  """Finds begin, end and stops; what a file says comes before what is guessed.

  Args:
    files: of `read_files_beside`.
    token_to_id: id of a token's text, None if it is unknown.
    own: ids that the tokenizer's own file says.
    adds_bos: whether the tokenizer's own file says that texts begin with the
      begin of text; counts where tokenizer_config.json does not say it.

  Raises:
    ValueError: a file is damaged, has a value of another type, or names a token
      that the tokenizer does not have.
  """
  config = read_json(files, TOKENIZER_CONFIG)
  named = named_tokens(files)
  ids = {}
  for key in {"bos_token", "eos_token"} & set(named):
    token = named[key]
    ids[key] = None if token is None else token_to_id(token)
    if token is not None and ids[key] is None:
      raise ValueError(f"{key}={token!r} is no token of the tokenizer")
  if ids:
    bos_id, eos_id = ids.get("bos_token", own[0]), ids.get("eos_token", own[1])
  else:
    bos_id, eos_id = _guessed(token_to_id, own)
  add_bos = _flag(config, "add_bos_token")
  _flag(config, "add_eos_token")  # documents always end with it, prompts never
  if add_bos is None:
    described = TOKENIZER_CONFIG in files or SPECIAL_TOKENS in files
    add_bos = adds_bos or not described
  stops = stop_ids(files)
  if eos_id is not None and eos_id not in stops:
    stops += (eos_id,)
  return SpecialIds(bos_id, eos_id, add_bos and bos_id is not None, stops)


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str | None]:
  """Texts of special tokens by key, such as "bos_token"; None where it is null.

  Raises:
    ValueError: a file is damaged, or a token is neither a text nor an object
      with a text "content".
  """
  found: dict[str, str | None] = {}
  for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
    stored = read_json(files, name)
    for key in _NAMED:
      if key in stored:
        found[key] = _token_text(name, key, stored[key])
  return found


def is_legacy(files: Mapping[str, bytes]) -> bool:
  """Whether a SentencePiece model puts a space before all it encodes.

  That is what SentencePiece itself does. Where tokenizer_config.json says
  "legacy": false, a space is put before a text that does not begin with one,
  and none after a special token.

  Raises:
    ValueError: tokenizer_config.json is damaged, or its "legacy" is no flag.
  """
  return _flag(read_json(files, TOKENIZER_CONFIG), "legacy") is not False


def stop_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
  """Ids that generation_config.json names as ends of a text.

  Raises:
    ValueError: they are no ids.
  """
  stored = read_json(files, GENERATION_CONFIG).get(_STOPS)
  if stored is None:
    return ()
  listed = stored if isinstance(stored, list) else [stored]
  for value in listed:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
      raise ValueError(
        f"{GENERATION_CONFIG}: {_STOPS}={stored!r} must be an id of at least "
        "0, or a list of ids"
      )
  return tuple(dict.fromkeys(listed))


def added_tokens(files: Mapping[str, bytes]) -> list[AddedToken]:
  """Tokens that files add to a SentencePiece model.

  Raises:
    ValueError: a file is damaged, or has a value of another type.
  """
  special = {token for token in named_tokens(files).values() if token}
  for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
    key = "additional_special_tokens"
    listed = read_json(files, name).get(key) or []
    if not isinstance(listed, list):
      raise ValueError(f"{name}: {key}={listed!r} must be a list")
    special |= {_token_text(name, key, token) or "" for token in listed}
  stored = read_json(files, TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
  tokens = {}
  for content, index in read_json(files, ADDED_TOKENS).items():
    tokens[content] = AddedToken(
      _id(ADDED_TOKENS, content, index), content, content in special
    )
  if not isinstance(stored, dict):
    raise ValueError(
      f"{TOKENIZER_CONFIG}: added_tokens_decoder={stored!r} must be an object"
    )
  for index, value in stored.items():
    key = f"added_tokens_decoder.{index}"
    content = _token_text(TOKENIZER_CONFIG, key, value)
    if content is None or not isinstance(value, dict):
      raise ValueError(
        f"{TOKENIZER_CONFIG}: {key}={value!r} must be an object with 'content'"
      )
    number = int(index) if index.isdecimal() else index
    tokens[content] = AddedToken(
      _id(TOKENIZER_CONFIG, key, number),
      content,
      bool(value.get("special")) or content in special,
      bool(value.get("lstrip")),
      bool(value.get("rstrip")),
    )
  return sorted(tokens.values(), key=lambda token: token.id)


def _guessed(token_to_id: Callable[[str], int | None], own: Ids) -> Ids:
  """Begin and end by name; a token without its counterpart is both."""
  pairs = [tuple(map(token_to_id, pair)) for pair in _BEGIN_END]
  by_name = next((pair for pair in pairs if pair != (None, None)), (None, None))
  begin, end = (
    theirs if ours is None else ours for ours, theirs in zip(own, by_name)
  )
  return (end if begin is None else begin), (begin if end is None else end)


def _token_text(name: str, key: str, value: Any) -> str | None:
  text = value.get("content") if isinstance(value, dict) else value
  if value is None or (isinstance(text, str) and text):
    return text
  raise ValueError(
    f"{name}: {key}={value!r} must be a text, an object with a text 'content', "
    "or null"
  )


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
  value = config.get(key)
  if value is not None and not isinstance(value, bool):
    raise ValueError(
      f"{TOKENIZER_CONFIG}: {key}={value!r} must be true, false or null"
    )
  return value


def _id(name: str, key: str, value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or value < 0:
    raise ValueError(f"{name}: the id of {key!r} must be at least 0: {value!r}")
  return value
