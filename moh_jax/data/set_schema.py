"""Schemas of the JSON files of a set of shards."""

from typing import Annotated, Literal

import msgspec

from moh_jax.json_files import Count, FileName, Sha256, Size, Text

_Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class Entry(msgspec.Struct, kw_only=True):
  """What metadata.json says of a shard."""

  file: FileName
  examples: Count
  bytes: Count
  xxh3: str = ""  # of the whole file; sets of older versions lack it
  # Older sets have a reason for each name in place of counts by reason.
  skipped: dict[str, Count | str] = {}


class TokenEntry(Entry):
  """What metadata.json says of a shard of tokens."""

  documents: Count
  tokens: Count
  text_bytes: Count


class _Set(msgspec.Struct, kw_only=True):
  examples: Count
  shards: list[Entry]
  skipped: Count = 0


class Images(_Set):
  """metadata.json of encoded images."""

  class_names: list[Text]


class Latents(Images, kw_only=True):
  """metadata.json of latents."""

  latent_shape: Annotated[list[Size], msgspec.Meta(min_length=3, max_length=3)]
  latent_scale: _Scale
  latent_shift: float = 0.0
  latent_mean: list[float] = []
  latent_std: list[_Scale] = []
  encoder_sha256: Sha256 = ""
  image_size: int | list[int]


class TokenizerEntry(msgspec.Struct, kw_only=True):
  """The tokenizer that made a set of tokens."""

  kind: Literal["tokenizer_json", "sentencepiece", "bytes"]
  sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
  # Empty for bytes, which have none.
  file: Annotated[str, msgspec.Meta(pattern=r"\A(?!\.{1,2}\Z)[^/\\\x00]*\Z")]


class Tokens(_Set):
  """metadata.json of tokens."""

  shards: list[TokenEntry]
  tokenizer: TokenizerEntry
  vocab_size: Size
  documents: Count
  tokens: Count
  text_bytes: Count
  bos_id: Count | None = None
  eos_id: Count | None = None
  notes: dict = {}


SCHEMAS = {"images": Images, "latents": Latents, "tokens": Tokens}
# Numbers of a set that are the sums of its shards' numbers.
SUMS = ("examples", "documents", "tokens", "text_bytes")


class Header(msgspec.Struct, kw_only=True):
  """The line of JSON at the start of a record of an image or a latent."""

  label: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
  name: str = ""


class Head(msgspec.Struct, kw_only=True):
  """What tells the kinds of sets apart."""

  format: str
  version: int
