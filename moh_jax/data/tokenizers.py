"""Tokenizers: tokenizer.json files, SentencePiece models, and plain bytes.

All kinds encode plain text: they add no begin or end of text, and encode text
that looks like a special token as text, unless asked to parse it. A
SentencePiece model normalizes the text as it was trained to, so decoding may
not give the same spaces and characters back.
"""

import functools
import hashlib
import os
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers as hf

from moh_jax.config.base import is_utf8
from moh_jax.data.input_files import import_extra
from moh_jax.data.tokenizer_files import (
  ADDED_TOKENS,
  GENERATION_CONFIG,
  MOST_BYTES,
  SPECIAL_TOKENS,
  STOPS,
  TOKENIZER_CONFIG,
  TOKENIZER_FILES,
  named_tokens,
  read_files_beside,
  read_json,
  stored_ids,
)
from moh_jax.data.tokenizer_limits import (
  TokenizerFileError,
  check_rules,
  library_errors,
  read_tokenizer_json,
  special_ends,
)
from moh_jax.runtime.files import read_bytes

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
Ids = tuple[int | None, int | None]  # of begin and end of text
_MOST_ENTRIES = 1 << 22  # of a trained vocabulary
_NO_FILES: Mapping[str, bytes] = types.MappingProxyType({})


class Tokenizer:
  """What all tokenizers have in common; they are picklable.

  Attributes:
    kind: its name in metadata of sets.
    file_name: name of the tokenizer's file, "" for kinds without one.
    content: bytes of that file.
    files: contents of the files beside it by name.
    sha256: SHA-256 of the content, which identifies the tokenizer.
    vocab_size: number of ids.
    bos_id: id of the begin of text, or None.
    eos_id: id of the end of text, which ends documents, or None.
    add_bos: whether texts begin with `bos_id`.
    stop_ids: ids that end a generated text, `eos_id` among them.
  """

  kind: str
  file_name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  add_bos: bool
  stop_ids: tuple[int, ...]

  def __init__(self, content: bytes, files: Mapping[str, bytes] = _NO_FILES):
    """Parses the content of a tokenizer's file.

    Args:
      content: of the file.
      files: beside it.

    Raises:
      TokenizerFileError: the content is not of that kind, or a library is
        missing.
      ValueError: one of the files is damaged or names an unknown token.
    """
    self.content, self.files = content, dict(files)
    self.sha256 = hashlib.sha256(content).hexdigest()

  def __reduce__(self):
    return type(self), (self.content, self.files)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text, without begin and end of text.

    Args:
      text: to encode.
      parse_special: names of special tokens in the text become these tokens.
    """
    raise NotImplementedError

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, where possible on several cores."""
    return list(map(self.encode, texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; special tokens and unknown ids are left out."""
    raise NotImplementedError

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id, None if it has none."""

  def _set_special(
    self, token_to_id: Callable[[str], int | None], own: Ids
  ) -> None:
    """Finds begin, end and stops: what a file says, else what is guessed.

    Args:
      token_to_id: id of a token's text, None if it is unknown.
      own: begin and end of text that the tokenizer's own file says. Where
        tokenizer_config.json does not say it, texts begin with its begin.

    Raises:
      ValueError: a file is damaged, or names a token that the tokenizer does
        not have.
    """
    named, said = named_tokens(self.files), {}
    for key in named.keys() & {"bos_token", "eos_token"}:
      token = named[key]
      said[key] = None
      if token is not None:
        said[key] = token_to_id(token) if is_utf8(token) else None
        if said[key] is None:
          raise ValueError(f"{key}={token!r} is no token of the tokenizer")
    if said:
      begin, end = said.get("bos_token", own[0]), said.get("eos_token", own[1])
    else:
      pairs = (tuple(map(token_to_id, pair)) for pair in _BEGIN_END)
      usual = next((p for p in pairs if p != (None, None)), (None, None))
      begin, end = (b if a is None else a for a, b in zip(own, usual))
      # A token without its counterpart is both.
      begin, end = (
        end if begin is None else begin,
        begin if end is None else end,
      )
    add_bos = read_json(self.files, TOKENIZER_CONFIG).get("add_bos_token")
    if add_bos is None:
      described = {TOKENIZER_CONFIG, SPECIAL_TOKENS} & self.files.keys()
      add_bos = own[0] is not None or not described
    stops = read_json(self.files, GENERATION_CONFIG).get(STOPS)
    stops = stops if isinstance(stops, list) else [stops]
    found = dict.fromkeys(i for i in (*stops, end) if i is not None)
    self.bos_id, self.eos_id, self.stop_ids = begin, end, tuple(found)
    self.add_bos = add_bos and begin is not None


class JsonTokenizer(Tokenizer):
  """Tokenizer of a tokenizer.json file, by the library `tokenizers`."""

  kind = "tokenizer_json"
  file_name = "tokenizer.json"

  def __init__(self, content: bytes, files: Mapping[str, bytes] = _NO_FILES):
    super().__init__(content, files)
    self._tokenizer = read_tokenizer_json(content, special_as_text=True)
    # Ids may have gaps, so the largest counts, not the number of entries.
    vocabulary = self._tokenizer.get_vocab()
    self.vocab_size = max(vocabulary.values(), default=-1) + 1
    for token, index in stored_ids(self.files).items():
      if (own := vocabulary.get(token, index)) != index:
        raise ValueError(
          f"{TOKENIZER_CONFIG} or {ADDED_TOKENS}: token {token!r} has the id "
          f"{index}, it is {own} in {self.file_name}"
        )
    self._set_special(vocabulary.get, special_ends(self._tokenizer))

  @functools.cached_property
  def parser(self) -> hf.Tokenizer:
    """That of the library to which names of special tokens are these tokens."""
    # A second one, since the switch of the library is not thread-safe.
    return read_tokenizer_json(self.content, special_as_text=False)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    used = self.parser if parse_special else self._tokenizer
    with library_errors("the tokenizer cannot encode a text"):
      return used.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    encode = self._tokenizer.encode_batch_fast
    with library_errors("the tokenizer cannot encode a text"):
      return [e.ids for e in encode(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    with library_errors("the tokenizer cannot decode its tokens"):
      return self._tokenizer.decode([int(i) for i in ids])

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    return self._tokenizer.id_to_token(token)


class SentencePieceTokenizer(Tokenizer):
  """Tokenizer of a tokenizer.model file, by the library `sentencepiece`.

  It encodes as SentencePiece does, with a space before the text and after a
  special token ("legacy" in transformers), and has the model's own tokens.
  Files beside it that add tokens, or want other spaces, are refused.
  """

  kind = "sentencepiece"
  file_name = "tokenizer.model"

  def __init__(self, content: bytes, files: Mapping[str, bytes] = _NO_FILES):
    super().__init__(content, files)
    try:
      library = import_extra("sentencepiece", "a SentencePiece model")
      self._processor = model = library.SentencePieceProcessor()
      model.LoadFromSerializedProto(content)  # refuses an empty file too
      self._special = {
        model.id_to_piece(i): i
        for i in range(model.vocab_size())
        if model.is_control(i) or model.is_unknown(i)
      }
    except (RuntimeError, ValueError) as error:
      what = "not a SentencePiece model: " * isinstance(error, RuntimeError)
      raise TokenizerFileError(f"{what}{error}") from error
    check_rules(content)
    self.vocab_size = model.vocab_size()
    self._check_files()
    own = (i if i >= 0 else None for i in (model.bos_id(), model.eos_id()))
    self._set_special(self._token_to_id, tuple(own))

  def _check_files(self) -> None:
    """Refuses what the files beside ask for and a model alone does not do."""
    config = read_json(self.files, TOKENIZER_CONFIG)
    added = (config.get("added_tokens_decoder") or {}).values()
    stripped = any(x.get("lstrip") or x.get("rstrip") for x in added)
    if stripped or not stored_ids(self.files).items() <= self._special.items():
      what = f"{TOKENIZER_CONFIG} or {ADDED_TOKENS} adds tokens to it"
    elif config.get("legacy") is False:
      what = f"{TOKENIZER_CONFIG}: 'legacy' is false"
    else:
      return
    raise TokenizerFileError(
      f"{what}, which needs a {TOKENIZER_FILES[0]} beside it: "
      "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained("
      "FOLDER) writes one"
    )

  def _token_to_id(self, token: str) -> int | None:
    found = self._processor.piece_to_id(token)
    return found if self._processor.id_to_piece(found) == token else None

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    known = 0 <= token < self.vocab_size
    return self._processor.id_to_piece(token) if known else None

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    names = sorted(self._special, key=len, reverse=True)
    pattern = f"({'|'.join(map(re.escape, names))})"
    ids: list[int] = []
    for part in re.split(pattern, text) if parse_special else [text]:
      special = self._special.get(part) if parse_special else None
      ids += self._encode(part) if special is None else [special]
    return ids

  def _encode(self, text: str | list[str]) -> list:
    with library_errors("the tokenizer cannot encode a text"):
      return self._processor.encode(text)

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    return self._encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    with library_errors("the tokenizer cannot decode its tokens"):
      return self._processor.decode(known)


class BytesTokenizer(Tokenizer):
  """Tokenizer whose ids 0 to 255 are UTF-8 bytes; 256 begins and ends text."""

  kind, file_name = "bytes", ""
  content, files = b"", _NO_FILES
  sha256 = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 257
  bos_id = eos_id = 256
  add_bos, stop_ids = True, (256,)

  def __init__(self, content: bytes = b"", files: Mapping = _NO_FILES):
    del content, files  # it has none

  __reduce__ = object.__reduce__  # a subclass may have a state

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    del parse_special  # no text names the special token
    return list(text.encode())

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def check_vocabulary(
  tokenizer: Tokenizer, vocab_size: int, source: str = ""
) -> None:
  """Checks that a model has all ids of a tokenizer.

  Args:
    tokenizer: of the model.
    vocab_size: number of token ids of the model.
    source: where the tokenizer is from, for the message.

  Raises:
    ValueError: it does not; the message says which.
  """
  where = f"{source}: " if source else ""
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"{where}the tokenizer has {tokenizer.vocab_size} ids, more than "
      f"model.vocab_size={vocab_size}"
    )
  if beyond := [i for i in tokenizer.stop_ids if i >= vocab_size]:
    raise ValueError(
      f"{where}{GENERATION_CONFIG}: eos_token_id {beyond[0]} must be below "
      f"model.vocab_size={vocab_size}"
    )


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """Loads a tokenizer from a file, and the files that lie beside it.

  Args:
    path: a tokenizer.json, a SentencePiece .model, a folder that holds a
      tokenizer.json or tokenizer.model, or "bytes".

  Raises:
    FileNotFoundError: there is no such file.
    TokenizerFileError: the file is damaged, or an optional library is missing.
    ValueError: it is of an unknown kind, or a file beside it is damaged.
  """
  if os.fspath(path) == "bytes":
    return BytesTokenizer()
  file = pathlib.Path(path)
  if file.is_dir():
    found = [f for name in TOKENIZER_FILES if (f := file / name).is_file()]
    if not found:
      raise FileNotFoundError(f"{file} holds none of {TOKENIZER_FILES}")
    file = found[0]
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such tokenizer file")
  kinds = {".json": JsonTokenizer, ".model": SentencePieceTokenizer}
  if file.suffix not in kinds:
    raise ValueError(
      f"{file}: a tokenizer file ends in one of {tuple(kinds)}; 'bytes' needs "
      "none"
    )
  return read_tokenizer(kinds[file.suffix], file)


def read_tokenizer(
  kind: type[Tokenizer], file: pathlib.Path, sha256: str = "", owner: str = ""
) -> Tokenizer:
  """Reads a tokenizer, and checks that it is the expected one.

  Args:
    kind: class of those that have a file.
    file: path of the file.
    sha256: of its content; "" accepts any.
    owner: what was made with that tokenizer, for the message.

  Raises:
    FileNotFoundError: there is no such file.
    TokenizerFileError: the file is damaged, or an optional library is missing.
    ValueError: it is another one, or a file beside it is damaged.
  """
  try:
    content = read_bytes(file, MOST_BYTES)
    tokenizer = kind(content, read_files_beside(file.parent))
  except TokenizerFileError as error:
    raise TokenizerFileError(f"{file}: {error}") from error
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  if sha256 and tokenizer.sha256 != sha256:
    raise ValueError(
      f"{file} has sha256 {tokenizer.sha256[:16]}, {owner} was made with a "
      f"tokenizer of {sha256[:16]}"
    )
  return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
  """Trains a byte-level BPE tokenizer, which encodes any text without loss.

  Args:
    texts: texts to train on.
    vocab_size: number of ids, among them the 256 bytes, `BEGIN` and `END`; a
      short text gives fewer.

  Returns:
    The content of a tokenizer.json.

  Raises:
    ValueError: `vocab_size` is below 258.
  """
  smallest = 256 + 2
  # The library takes memory for all entries.
  if not smallest <= vocab_size <= _MOST_ENTRIES:
    raise ValueError(
      f"vocab_size={vocab_size} must be at least {smallest}, the 256 bytes, "
      f"{BEGIN} and {END}, and at most {_MOST_ENTRIES}"
    )
  tokenizer: Any = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[BEGIN, END],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer.to_str().encode()
