"""Divides documents into a training part and a held-out part."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class HeldOutPart:
  """Chooses the documents of a held-out part, or the rest, by their text.

  A hash of the text decides, so the choice depends on nothing else: not on the
  name or place of a file, nor on what other documents there are. Documents of
  the same text are in the same part.

  Attributes:
    share: share of the documents in the held-out part, in (0, 1).
    held_out: whether to choose the held-out part; False chooses the rest.

  Raises:
    ValueError: `share` is out of range.
  """

  share: float
  held_out: bool

  def __post_init__(self):
    if not 0 < self.share < 1:
      raise ValueError(f"held_out={self.share} must be between 0 and 1")

  def __call__(self, text: str) -> bool:
    """Returns whether the document `text` belongs to the part."""
    return (_number(text) < self.share) == self.held_out


def held_out_parts(share: float) -> dict[str, HeldOutPart]:
  """Divides documents among "train" and "val", which gets `share` of them.

  Raises:
    ValueError: `share` is not between 0 and 1.
  """
  return {"train": HeldOutPart(share, False), "val": HeldOutPart(share, True)}


def fill_parts(
  parts: Mapping[str, Any], texts: Iterable[str]
) -> dict[str, Any]:
  """Gives each of two parts a document where the share leaves one empty.

  The share moves just past the lowest or the highest number of a text. Where
  the hash gives both parts a document, nothing changes, and no more texts are
  taken than needed to see it.

  Args:
    parts: by split; others than `held_out_parts` makes are returned as given.
    texts: the documents that have text.

  Raises:
    ValueError: there are fewer than two documents, or all have the same text.
  """
  keeps = [keep for keep in parts.values() if isinstance(keep, HeldOutPart)]
  if len(keeps) < 2 or len({keep.share for keep in keeps}) > 1:
    return dict(parts)
  share = keeps[0].share
  low, high, count = 1.0, 0.0, 0
  for text in texts:
    number = _number(text)
    low, high, count = min(low, number), max(high, number), count + 1
    if low < share <= high:
      return dict(parts)
  if not count:
    raise ValueError("the input has no document")
  if low == high:
    same = "document" if count == 1 else "documents, all of one text"
    raise ValueError(
      f"the input has {count} {same}, and documents are not cut; tokenize "
      "other files with --split val, and this one with --split train"
    )
  share = high if low < share else math.nextafter(low, 1)
  return {
    split: dataclasses.replace(keep, share=share)
    for split, keep in parts.items()
  }


def _number(text: str) -> float:
  """A number in [0, 1) that a text has by its hash."""
  content = text.encode(errors="surrogateescape")
  # A hash of our own: the texts may be what another hash of them chose.
  digest = hashlib.blake2b(content, digest_size=8, person=b"moh_jax").digest()
  return int.from_bytes(digest, "little") / 2**64
