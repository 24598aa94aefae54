"""Handles images that cannot be read or are too small: raises or replaces."""

import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any

from moh_jax.data.identity import Identity

_log = logging.getLogger(__name__)
Fit = Callable[[dict[str, Any]], dict[str, Any]]
_MOST_NAMED = 10  # bad images in one message


class CheckedSource:
  """A source whose bad images raise, or are replaced by the next good one.

  The replacement depends on the index alone, so a stream keeps its length and
  its positions whatever images are bad.
  """

  def __init__(
    self,
    source: Any,
    *,
    skip: bool,
    smallest: tuple[int, int] = (0, 0),
    decode: str = "exact",
  ):
    """Wraps a source.

    Args:
      source: source that raises ValueError or FileNotFoundError for an example
        that it cannot read.
      skip: whether bad images are replaced; otherwise they raise.
      smallest: minimum rows and columns of an image.
      decode: `data.decode`, which changes pixels and so the identity.
    """
    self._source, self._skip, self._smallest = source, skip, smallest
    self._decode = decode
    self._bad: dict[int, object] = {}
    self.class_names = source.class_names
    self.channels = source.channels
    self.encoder_sha256 = getattr(source, "encoder_sha256", "")
    if hasattr(source, "read"):  # those of files, to be timed
      self.read = source.read

  def name(self, index: int) -> str:
    """Name of image `index`, for messages."""
    return self._source.name(index)

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    found = self._source.identity()
    # "exact" goes unsaid, as in checkpoints from before there was a choice.
    return found | ({"decode": self._decode} if self._decode != "exact" else {})

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._first_good(index, lambda i: self._checked(self._source[i], i))

  def fitted(self, index: int, fit: Fit) -> dict[str, Any]:
    """An example after `fit`, which may raise for an image that is damaged.

    Args:
      index: of the image.
      fit: maps {"image", "label"}; "image" may be a `LaterImage`.
    """
    return self._first_good(
      index, lambda i: fit(self._checked(self._source.open(i), i))
    )

  def _first_good(
    self, index: int, read: Callable[[int], dict[str, Any]]
  ) -> dict[str, Any]:
    size = len(self._source)
    for step in range(size):
      candidate = (index + step) % size
      try:
        return read(candidate)
      except (ValueError, FileNotFoundError) as error:
        if not self._skip:
          raise
        self._warn_once(candidate, error)
    raise ValueError(f"none of the {size} images can be read")

  def read_all(self, threads: int, advice: str) -> str:
    """Reads every example once.

    Args:
      threads: number of threads that read.
      advice: what to do about bad images.

    Returns:
      A message that names those that cannot be read, "" where all can.
    """

    def error(index: int) -> str:
      try:
        self._checked(self._source[index], index)
      except (ValueError, FileNotFoundError) as bad:
        return str(bad)
      return ""

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
      bad = [text for text in pool.map(error, range(len(self))) if text]
    if not bad:
      return ""
    more = f"; and {len(bad) - _MOST_NAMED} more" * (len(bad) > _MOST_NAMED)
    return (
      f"{len(bad)} of {len(self)} images cannot be used: "
      f"{'; '.join(bad[:_MOST_NAMED])}{more}; {advice}"
    )

  def _checked(self, example: dict[str, Any], index: int) -> dict[str, Any]:
    """An example that is large enough."""
    rows, columns = example["image"].shape[:2]
    if rows < self._smallest[0] or columns < self._smallest[1]:
      raise ValueError(
        f"{self._source.name(index)}: {rows} x {columns} pixels (rows x "
        f"columns), at least {self._smallest[0]} x {self._smallest[1]} needed"
      )
    return example

  def _warn_once(self, index: int, error: Exception):
    token = object()
    # `setdefault` is atomic, so exactly one of several threads warns.
    if self._bad.setdefault(index, token) is token:
      _log.warning("skipped %s (%d so far)", error, len(self._bad))
