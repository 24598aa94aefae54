"""The items of JSON values of a checkpoint as they lie on disk."""

from typing import Annotated, Any

import msgspec
from etils import epath

from moh_jax.json_files import MAX_BYTES, Sha256, Text, check_json, parse_json


class StoredConfig(msgspec.Struct):
  """What is read of the item: see `runtime.checkpoint.Metadata`."""

  config: dict[str, dict]
  class_names: Annotated[list[Text], msgspec.Meta(max_length=2**24)]
  tokenizer_sha256: Sha256 = ""
  encoder_sha256: Sha256 = ""


class StoredWatch(msgspec.Struct):
  """What decides over rewinds: see `training.rewind.Watch.to_json`."""

  rewinds: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
  mean_loss: float | None = None


class StoredData(msgspec.Struct):
  """The item `data`: where the training stream stands, and which it is."""

  position: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
  # Older versions stored neither.
  stream: dict[str, Any] | None = None
  watch: StoredWatch | None = None


_KINDS = {"config": StoredConfig, "data": StoredData}


def read_stored(
  step_folder: epath.Path, item: str = "config"
) -> dict[str, Any]:
  """Reads an item of a step folder.

  Args:
    step_folder: of one step.
    item: "config" or "data".

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is damaged; the message names the file.
  """
  file = step_folder / item / "metadata"
  if not file.is_file():
    raise FileNotFoundError(f"{file}: no such file; the checkpoint is damaged")
  with file.open("rb") as stream:
    content = stream.read(MAX_BYTES + 1)
  return parse_json(content, _KINDS[item], str(file))


def check_stored(stored: Any) -> dict[str, Any]:
  """Checks what `read_stored` or the header of an exported file gave."""
  return check_json(stored, StoredConfig)
