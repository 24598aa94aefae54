"""Files that lie beside a tokenizer's own and say how a model is used with it.

They are those that transformers writes: which tokens begin and end a text
(tokenizer_config.json, special_tokens_map.json), at which tokens a generated
text stops (generation_config.json), and chat templates. They go wherever the
tokenizer goes: into token sets, runs, converted and exported models. What
identifies a tokenizer is its own file alone.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from etils import epath

from moh_jax.runtime.files import read_bytes, write_whole
from moh_jax.runtime.json_files import parse_json

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first is read
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"  # further templates by name
_NAMES = (
  TOKENIZER_CONFIG,
  SPECIAL_TOKENS,
  ADDED_TOKENS,
  *("vocab.json", "merges.txt"),  # what tokenizer.json was made from
  GENERATION_CONFIG,
  TEMPLATE,
  TEMPLATE_JSON,
)
_MODEL_CONFIG = "config.json"
_STOPS = "eos_token_id"
MOST_BYTES = 1 << 27  # tokenizer.json of a large vocabulary: some 10 MB
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

_Id = Annotated[int, msgspec.Meta(ge=0)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Added(msgspec.Struct):
  content: _Text
  lstrip: bool = False
  rstrip: bool = False


_NAMED = tuple(
  f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_SpecialTokens = msgspec.defstruct(
  "_SpecialTokens", [(name, _Text | _Added | None, None) for name in _NAMED]
)


class _Config(_SpecialTokens):  # type: ignore[misc, valid-type]
  add_bos_token: bool | None = None
  add_eos_token: bool | None = None  # documents end with it, prompts never
  legacy: bool | None = None
  added_tokens_decoder: dict[str, _Added] | None = None


class _Generation(msgspec.Struct):
  eos_token_id: _Id | list[_Id] | None = None


_SCHEMAS = {
  TOKENIZER_CONFIG: _Config,
  SPECIAL_TOKENS: _SpecialTokens,
  ADDED_TOKENS: dict[str, _Id],
  GENERATION_CONFIG: _Generation,
}


def read_files_beside(folder: str | os.PathLike) -> dict[str, bytes]:
  """Reads the files that lie beside a tokenizer.

  A folder of transformers may name the ends of generated texts in config.json
  alone; they are returned as generation_config.json, where transformers looks
  for them first.

  Args:
    folder: local, or in a bucket.

  Returns:
    Contents by name, relative to the folder; those that exist.

  Raises:
    ValueError: config.json or generation_config.json is not a JSON object.
  """
  folder = epath.Path(folder)
  paths = [folder / name for name in _NAMES]
  templates = folder / TEMPLATE_FOLDER
  if templates.is_dir():
    paths += sorted(templates.glob("*.jinja"))
  files = {
    os.fspath(path.relative_to(folder)): read_bytes(path, MOST_BYTES)
    for path in paths
    if path.is_file()
  }
  model = folder / _MODEL_CONFIG
  if model.is_file():
    content = read_bytes(model, MOST_BYTES)
    stops = parse_json(content, dict, os.fspath(model)).get(_STOPS)
    generation = read_json(files, GENERATION_CONFIG)
    if stops is not None and generation.get(_STOPS) is None:
      generation[_STOPS] = stops
      files[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
  return files


def write_tokenizer_files(
  folder: str | os.PathLike, files: Mapping[str, bytes]
) -> None:
  """Writes files where they are missing or differ, each whole or not at all.

  Args:
    folder: local, or in a bucket; created.
    files: contents by name, relative to the folder.
  """
  folder = epath.Path(folder)
  for name, content in files.items():
    path = folder / name
    if path.is_file() and path.read_bytes() == content:
      continue
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def copy_tokenizer_files(
  source: str | os.PathLike, target: str | os.PathLike
) -> str:
  """Copies a tokenizer with all files that belong to it.

  Args:
    source: folder of a tokenizer, such as a run's working directory, an output
      of `convert`, or a folder of transformers.
    target: folder to write to; created if there is anything to write.

  Returns:
    The SHA-256 of the tokenizer's file; "", and nothing is written, where there
    is none.

  Raises:
    ValueError: a file is not a JSON object, see `read_files_beside`.
  """
  source = epath.Path(source)
  own = {
    name: read_bytes(source / name, MOST_BYTES)
    for name in TOKENIZER_FILES
    if (source / name).is_file()
  }
  if not own:
    return ""
  write_tokenizer_files(target, {**own, **read_files_beside(source)})
  return hashlib.sha256(next(iter(own.values()))).hexdigest()


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
  """Parses one of the files; {} if it is missing.

  Raises:
    ValueError: it is no JSON object, or a field that is used here is of
      another type; the message begins with the name of the file.
  """
  kind = _SCHEMAS.get(name, dict)
  return parse_json(files[name], kind, name) if name in files else {}


def special_ids(
  files: Mapping[str, bytes],
  token_to_id: Callable[[str], int | None],
  own: Ids,
) -> tuple[int | None, int | None, bool, tuple[int, ...]]:
  """Finds begin, end and stops; what a file says comes before what is guessed.

  Args:
    files: beside the tokenizer.
    token_to_id: id of a token's text, None if it is unknown.
    own: begin and end of text that the tokenizer's own file says. Where
      tokenizer_config.json does not say it, texts begin with its begin.

  Returns:
    `bos_id`, `eos_id`, `add_bos` and `stop_ids` of `Tokenizer`.

  Raises:
    ValueError: a file is damaged, or names a token that the tokenizer does not
      have.
  """
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
  add_bos = read_json(files, TOKENIZER_CONFIG).get("add_bos_token")
  if add_bos is None:
    described = TOKENIZER_CONFIG in files or SPECIAL_TOKENS in files
    add_bos = own[0] is not None or not described
  stops = read_json(files, GENERATION_CONFIG).get(_STOPS)
  stops = stops if isinstance(stops, list) else [stops]
  found = dict.fromkeys(i for i in (*stops, eos_id) if i is not None)
  return bos_id, eos_id, add_bos and bos_id is not None, tuple(found)


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str | None]:
  """Texts of special tokens by key, such as "bos_token"; None where it is null.

  Raises:
    ValueError: a file is damaged.
  """
  found: dict[str, str | None] = {}
  for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
    stored = read_json(files, name)
    for key in _NAMED:
      if key in stored:
        token = stored[key]
        found[key] = token["content"] if isinstance(token, dict) else token
  return found


def _guessed(token_to_id: Callable[[str], int | None], own: Ids) -> Ids:
  """Begin and end by name; a token without its counterpart is both."""
  pairs = [tuple(map(token_to_id, pair)) for pair in _BEGIN_END]
  by_name = next((pair for pair in pairs if pair != (None, None)), (None, None))
  begin, end = (
    theirs if ours is None else ours for ours, theirs in zip(own, by_name)
  )
  return (end if begin is None else begin), (begin if end is None else end)
