"""What becomes of images that cannot be read, or are too small."""

import logging
from typing import Any

_log = logging.getLogger(__name__)


class CheckedSource:
  """A source whose bad images are refused, or replaced by the next good one.

  The replacement depends on the index alone, so a stream over this source has
  the same length and the same positions as over a source without bad images.
  """

  def __init__(
    self, source: Any, *, skip: bool, smallest: tuple[int, int] = (0, 0)
  ):
    """Wraps a source.

    Args:
      source: its examples raise ValueError or FileNotFoundError where they
        cannot be read.
      skip: replace bad images; otherwise they raise.
      smallest: rows and columns that an image must have.
    """
    self._source, self._skip, self._smallest = source, skip, smallest
    self._bad: dict[int, object] = {}
    self.class_names = source.class_names
    self.channels = source.channels

  def name(self, index: int) -> str:
    """The image's name."""
    return self._source.name(index)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    size = len(self._source)
    for step in range(size):
      candidate = (index + step) % size
      try:
        return self._read(candidate)
      except (ValueError, FileNotFoundError) as error:
        if not self._skip:
          raise
        self._warn_once(candidate, error)
    raise ValueError(f"none of the {size} images can be read")

  def _read(self, index: int) -> dict[str, Any]:
    example = self._source[index]
    rows, columns = example["image"].shape[:2]
    if rows < self._smallest[0] or columns < self._smallest[1]:
      raise ValueError(
        f"{self._source.name(index)}: {rows} x {columns} pixels (rows x "
        f"columns), at least {self._smallest[0]} x {self._smallest[1]} needed"
      )
    return example

  def _warn_once(self, index: int, error: Exception):
    mine = object()
    # One step, so that of several threads exactly one warns.
    if self._bad.setdefault(index, mine) is mine:
      _log.warning("skipped %s (%d so far)", error, len(self._bad))
