"""What `export` says of a model in the header of a safetensors file."""

import json

from moh_jax.config import family_of_format
from moh_jax.convert.tensor_files import read_text
from moh_jax.runtime.checkpoint import (
  Metadata,
  metadata_from_json,
  metadata_to_json,
)

_ENTRY = "moh_jax"


def to_text(metadata: Metadata) -> dict[str, str]:
  """The config, in which the preprocessing is, and the class names."""
  return {_ENTRY: json.dumps(metadata_to_json(metadata))}


def read(kind: str, source: str) -> Metadata | None:
  """What `to_text` made; None where the source is no exported file.

  Args:
    kind: format that the source should have, of `config.public_formats()`.
    source: any path.

  Raises:
    ValueError: it was a model of another family, or of another version.
  """
  text = read_text(source).get(_ENTRY)
  if text is None:
    return None
  try:
    metadata = metadata_from_json(json.loads(text))
  except (KeyError, ValueError) as error:
    raise ValueError(f"{source}: its metadata: {error}") from error
  family = metadata.config.model.family
  if family != family_of_format(kind).name:
    raise ValueError(f"--from {kind!r}: {source} holds a model of {family!r}")
  return metadata
