"""Tokenizers: tokenizer.json files, SentencePiece models, and plain bytes.

All kinds encode plain text: they add no begin or end of text, and encode text
that looks like a special token as text, unless asked to parse it. A
SentencePiece model normalizes the text as it was trained to, so decoding may
not give the same spaces and characters back.

The files that transformers writes beside a tokenizer say how a model is used
with it: which tokens begin and end a text, at which tokens a generated text
stops, and chat templates. They go wherever the tokenizer goes: into token sets,
runs, converted and exported models. What identifies a tokenizer is its own file
alone.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers as hf
from etils import epath

from moh_jax.data.files import StrPath, import_extra
from moh_jax.runtime.alive import alive
from moh_jax.runtime.files import parse_json, write_whole

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
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first is read
FILES_BESIDE = (
  TOKENIZER_CONFIG := "tokenizer_config.json",
  SPECIAL_TOKENS := "special_tokens_map.json",
  ADDED_TOKENS := "added_tokens.json",
  GENERATION_CONFIG := "generation_config.json",
  TEMPLATE := "chat_template.jinja",
  *("vocab.json", "merges.txt"),  # what tokenizer.json was made from
)
TEMPLATE_FOLDER = "additional_chat_templates"  # further templates by name
_STOPS = "eos_token_id"
_ONE_TOKEN = hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a"))


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

  def __init__(self, content: bytes, files: Mapping[str, bytes] | None = None):
    """Parses the content of a tokenizer's file.

    Args:
      content: of the file.
      files: beside it.

    Raises:
      ValueError: the content is not of that kind, one of the files is damaged
        or names an unknown token, or a library is missing.
    """
    self.content, self.files = content, dict(files or {})
    self.sha256 = hashlib.sha256(content).hexdigest()

  def __reduce__(self):
    return type(self), (self.content, self.files)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text, without begin and end of text.

    Args:
      text: to encode.
      parse_special: names of special tokens in the text become these tokens.
    """

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, where possible on several cores."""
    return list(map(self.encode, texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; special tokens and unknown ids are left out."""

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id, None if it has none."""

  def _set_special(
    self, token_to_id: Callable[[str], int | None], own: Sequence[int | None]
  ) -> None:
    """Finds begin, end and stops: what a file says, else what is guessed.

    Args:
      token_to_id: id of a token's text, None if it is unknown.
      own: begin and end of text that the tokenizer's own file says. Where
        tokenizer_config.json does not say it, texts begin with its begin.
    """
    ends = dict(zip(("bos_token", "eos_token"), own))
    named = {k: x for k, x in named_tokens(self.files).items() if k in ends}
    for key, token in named.items():
      ends[key] = token_to_id(token) if token else None
      if token and ends[key] is None:
        raise ValueError(f"{key}={token!r} is no token of the tokenizer")
    begin, end = ends.values()
    if not named:
      pairs = (tuple(map(token_to_id, pair)) for pair in _BEGIN_END)
      usual = next((p for p in pairs if p != (None, None)), (None, None))
      begin, end = (b if a is None else a for a, b in zip(own, usual))
      # A token without its counterpart is both.
      begin = end if begin is None else begin
      end = begin if end is None else end
    add_bos = read_json(self.files, TOKENIZER_CONFIG).get("add_bos_token")
    if add_bos is None:
      described = {TOKENIZER_CONFIG, SPECIAL_TOKENS} & self.files.keys()
      add_bos = own[0] is not None or not described
    stops = read_json(self.files, GENERATION_CONFIG).get(_STOPS)
    stops = stops if isinstance(stops, list) else [stops]
    found = dict.fromkeys(i for i in (*stops, end) if i is not None)
    self.bos_id, self.eos_id, self.stop_ids = begin, end, tuple(found)
    self.add_bos = add_bos and begin is not None


class JsonTokenizer(Tokenizer):
  """Tokenizer of a tokenizer.json file, by the library `tokenizers`."""

  kind, file_name = "tokenizer_json", TOKENIZER_FILES[0]

  def __init__(self, content: bytes, files: Mapping[str, bytes] | None = None):
    super().__init__(content, files)
    self._tokenizer = self._parsed(special_as_text=True)
    # Ids may have gaps, so the largest counts, not the number of entries.
    vocabulary = self._tokenizer.get_vocab()
    self.vocab_size = max(vocabulary.values(), default=-1) + 1
    # The special tokens that the file itself puts around a text.
    made = self._tokenizer.post_process(_ONE_TOKEN.encode("a"))
    pairs = zip(made.ids, made.special_tokens_mask)
    first, *others = [i if is_special else None for i, is_special in pairs]
    self._set_special(vocabulary.get, (first, others[-1] if others else None))

  def _parsed(self, *, special_as_text: bool) -> hf.Tokenizer:
    try:
      tokenizer = hf.Tokenizer.from_str(self.content.decode())
    except Exception as error:  # the library has no class for it
      raise ValueError(f"not a {self.file_name}: {error}") from error
    tokenizer.encode_special_tokens = special_as_text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
      tokenizer.model.dropout = None  # of its training: equal texts, equal ids
    return tokenizer

  @functools.cached_property
  def parser(self) -> hf.Tokenizer:
    """That of the library to which names of special tokens are these tokens."""
    # A second one, since the switch of the library is not thread-safe.
    return self._parsed(special_as_text=False)

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    used = self.parser if parse_special else self._tokenizer
    return used.encode(text, add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    encode = self._tokenizer.encode_batch_fast
    return [one.ids for one in encode(list(texts), add_special_tokens=False)]

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
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

  kind, file_name = "sentencepiece", TOKENIZER_FILES[1]

  def __init__(self, content: bytes, files: Mapping[str, bytes] | None = None):
    super().__init__(content, files)
    library = import_extra("sentencepiece", "a SentencePiece model")
    self._processor = model = library.SentencePieceProcessor()
    try:
      model.LoadFromSerializedProto(content)  # refuses an empty file too
    except RuntimeError as error:
      raise ValueError(f"not a SentencePiece model: {error}") from error
    self.vocab_size = model.vocab_size()
    ids = {model.id_to_piece(i): i for i in range(self.vocab_size)}
    special = [i for i in ids.values() if model.is_control(i)]
    special.append(model.unk_id())
    self._special = {model.id_to_piece(i): i for i in special}
    self._check_files()
    own = [i if i >= 0 else None for i in (model.bos_id(), model.eos_id())]
    self._set_special(ids.get, own)

  def _check_files(self) -> None:
    """Refuses what the files beside ask for and a model alone does not do."""
    config = read_json(self.files, TOKENIZER_CONFIG)
    added = (config.get("added_tokens_decoder") or {}).values()
    names = {one["content"] for one in added}
    names.update(read_json(self.files, ADDED_TOKENS))
    stripped = any(x.get("lstrip") or x.get("rstrip") for x in added)
    is_changed = stripped or not names <= self._special.keys()
    if is_changed or config.get("legacy") is False:
      raise ValueError(
        f"{TOKENIZER_CONFIG} or {ADDED_TOKENS} adds tokens, or has 'legacy' "
        "false; a tokenizer.json is needed, as AutoTokenizer writes it"
      )

  def id_to_token(self, token: int) -> str | None:
    """Returns the name of an id."""
    known = 0 <= token < self.vocab_size
    return self._processor.id_to_piece(token) if known else None

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    if not parse_special:
      return self._processor.encode(text)
    names = sorted(self._special, key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, names))})", text):
      special = self._special.get(part)
      ids += self._processor.encode(part) if special is None else [special]
    return ids

  def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    return self._processor.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    known = [int(i) for i in ids if 0 <= i < self.vocab_size]
    return self._processor.decode(known)


class BytesTokenizer(Tokenizer):
  """Tokenizer whose ids 0 to 255 are UTF-8 bytes; 256 begins and ends text."""

  kind, file_name = "bytes", ""
  sha256 = hashlib.sha256(b"bytes").hexdigest()
  vocab_size = 257
  bos_id = eos_id = 256
  add_bos, stop_ids = True, (256,)

  def __init__(self):
    self.content, self.files = b"", {}

  __reduce__ = object.__reduce__  # the base's would pass arguments on

  def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
    """Returns the ids of a text."""
    return list(text.encode())  # no text names the special token

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def check_vocabulary(ids: int, vocab_size: int, where: Any) -> None:
  """Checks that a model has all ids of a tokenizer.

  Args:
    ids: of the tokenizer, how many.
    vocab_size: number of token ids of the model.
    where: where the tokenizer is from, for the message.

  Raises:
    ValueError: it does not; the message says which.
  """
  if ids > vocab_size:
    raise ValueError(f"{where}: {ids} ids, more than model.{vocab_size=}")


def load_tokenizer(
  path: StrPath, sha256: str = "", owner: str = ""
) -> Tokenizer:
  """Loads a tokenizer from a file, and the files that lie beside it.

  Args:
    path: a tokenizer.json, a SentencePiece .model, a folder that holds a
      tokenizer.json or tokenizer.model, or "bytes"; local, or in a bucket.
    sha256: of its content; "" accepts any.
    owner: what was made with that tokenizer, for the message.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is another one, a file is damaged, or an optional library is
      missing.
  """
  if os.fspath(path) == "bytes" or sha256 == BytesTokenizer.sha256:
    return BytesTokenizer()
  file = epath.Path(path)
  if file.is_dir():
    found = [f for name in TOKENIZER_FILES if (f := file / name).is_file()]
    file = found[0] if found else file / TOKENIZER_FILES[0]
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such tokenizer file")
  is_model = file.suffix == ".model"
  kind = SentencePieceTokenizer if is_model else JsonTokenizer
  try:
    tokenizer = kind(file.read_bytes(), read_files_beside(file.parent))
  except ValueError as error:
    raise ValueError(f"{file}: {error}") from error
  if sha256 and tokenizer.sha256 != sha256:
    raise ValueError(f"{file}: {owner} was made with another tokenizer")
  return tokenizer


def read_files_beside(folder: StrPath) -> dict[str, bytes]:
  """Reads the files that lie beside a tokenizer.

  A folder of transformers may name the ends of generated texts in config.json
  alone; they are returned as generation_config.json, where transformers looks
  for them first.

  Args:
    folder: local, or in a bucket.

  Returns:
    Contents by name, relative to the folder; those that exist.
  """
  folder = epath.Path(folder)
  paths = [folder / name for name in (*FILES_BESIDE, "config.json")]
  if (templates := folder / TEMPLATE_FOLDER).is_dir():
    paths += sorted(templates.glob("*.jinja"))
  found = [path for path in paths if path.is_file()]
  files = {os.fspath(x.relative_to(folder)): x.read_bytes() for x in found}
  stops = read_json(files, "config.json").get(_STOPS)
  generation = read_json(files, GENERATION_CONFIG)
  if stops is not None and generation.get(_STOPS) is None:
    generation[_STOPS] = stops
    files[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
  files.pop("config.json", None)
  return files


def write_tokenizer_files(folder: StrPath, files: Mapping[str, bytes]) -> None:
  """Writes files, each whole or not at all.

  Args:
    folder: local, or in a bucket; created.
    files: contents by name, relative to the folder.
  """
  for name, content in files.items():
    write_whole(epath.Path(folder) / name, content)


def copy_tokenizer_files(source: StrPath, target: StrPath) -> str:
  """Copies a tokenizer with all files that belong to it.

  Args:
    source: folder of a tokenizer, such as a run's working directory, an output
      of `convert`, or a folder of transformers.
    target: folder to write to; created if there is anything to write.

  Returns:
    The SHA-256 of the tokenizer's file; "", and nothing is written, where there
    is none.
  """
  paths = [epath.Path(source) / name for name in TOKENIZER_FILES]
  own = {path.name: path.read_bytes() for path in paths if path.is_file()}
  if not own:
    return ""
  write_tokenizer_files(target, {**own, **read_files_beside(source)})
  return hashlib.sha256(next(iter(own.values()))).hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
  """Parses one of the files beside a tokenizer; {} if it is missing.

  Raises:
    ValueError: it is no JSON object; the message begins with its name.
  """
  return parse_json(files[name], dict, name) if name in files else {}


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str | None]:
  """Texts of special tokens by key, such as "bos_token"; None where it is null.

  Raises:
    ValueError: a file is damaged.
  """
  return {
    key: token["content"] if isinstance(token, dict) else token
    for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG)
    for key, token in read_json(files, name).items()
    if key.endswith("_token") and isinstance(token, str | dict | None)
  }


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
  """Trains a byte-level BPE tokenizer, which encodes any text without loss.

  Args:
    texts: texts to train on.
    vocab_size: number of ids, among them the 256 bytes, `BEGIN` and `END`, so
      at least 258; a short text gives fewer.

  Returns:
    The content of a tokenizer.json.
  """
  tokenizer: Any = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[BEGIN, END],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  with alive("training the vocabulary"):
    tokenizer.train_from_iterator(texts, trainer)
  return tokenizer.to_str().encode()
