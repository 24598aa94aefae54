"""Files that lie beside a tokenizer's own: how a model is used with it.

They are those that transformers writes: which tokens begin and end a text
(tokenizer_config.json, special_tokens_map.json), at which tokens a generated
text stops (generation_config.json), and chat templates. They go wherever the
tokenizer goes: into token sets, runs, converted and exported models. What
identifies a tokenizer is its own file alone.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from etils import epath

from moh_jax.runtime.files import read_bytes, write_whole
from moh_jax.runtime.json_files import parse_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # the first is read
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"  # further templates by name
FILES_BESIDE = (
  TOKENIZER_CONFIG,
  SPECIAL_TOKENS,
  ADDED_TOKENS,
  *("vocab.json", "merges.txt"),  # what tokenizer.json was made from
  GENERATION_CONFIG,
  TEMPLATE,
  TEMPLATE_JSON,
)
_MODEL_CONFIG = "config.json"
STOPS = "eos_token_id"
MOST_BYTES = 1 << 27  # tokenizer.json of a large vocabulary: some 10 MB

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
  paths = [folder / name for name in FILES_BESIDE]
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
    stops = parse_json(content, dict, os.fspath(model)).get(STOPS)
    generation = read_json(files, GENERATION_CONFIG)
    if stops is not None and generation.get(STOPS) is None:
      generation[STOPS] = stops
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


def stored_ids(files: Mapping[str, bytes]) -> dict[str, int]:
  """Ids of the tokens that the files add to a tokenizer, by their texts.

  Raises:
    ValueError: a file is damaged, or a token has two ids.
  """
  ids = dict(read_json(files, ADDED_TOKENS))
  added = read_json(files, TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
  for key, token in added.items():
    index = int(key) if key.isdecimal() else -1
    if (other := ids.setdefault(token["content"], index)) != index:
      raise ValueError(
        f"{TOKENIZER_CONFIG} or {ADDED_TOKENS}: token {token['content']!r} has "
        f"the ids {other} and {index}"
      )
  return ids


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
