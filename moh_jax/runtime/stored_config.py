"""The item `config` of a checkpoint as it lies on disk."""

from typing import Annotated, Any

import msgspec
from etils import epath

from moh_jax.json_files import MAX_BYTES, Text, check_json, parse_json


class StoredConfig(msgspec.Struct):
  """What is read of the item: see `runtime.checkpoint.Metadata`."""

  config: dict[str, dict]
  class_names: Annotated[list[Text], msgspec.Meta(max_length=2**24)]
  tokenizer_sha256: Annotated[
    str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")
  ] = ""


def read_stored(step_folder: epath.Path) -> dict[str, Any]:
  """Reads the item of a step folder.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged; the message names the file.
  """
  file = step_folder / "config" / "metadata"
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such file; the checkpoint is damaged")
  with file.open("rb") as stream:
    content = stream.read(MAX_BYTES + 1)
  return parse_json(content, StoredConfig, str(file))


def check_stored(stored: Any) -> dict[str, Any]:
  """Checks what `read_stored` or the header of an exported file gave."""
  return check_json(stored, StoredConfig)
