"""The results of `bench card`: a folder with one JSON file per stage."""

import os
import pathlib
from typing import Any

from moh_jax.files import replacing
from moh_jax.json_files import plain, read_json, strict_json
from moh_jax.speed.report import Row

_SUFFIX = ".json"


class Store:
  """Results by stage, each in a file that is whole or absent.

  Attributes:
    folder: where they are.
  """

  def __init__(self, folder: str | os.PathLike, settings: dict[str, Any]):
    """Opens a folder, which is made if it does not exist.

    Args:
      folder: which.
      settings: what results depend on, such as the device; results of others
        are not taken for those of these.

    Raises:
      ValueError: the folder holds results of another device.
      OSError: it is none, or cannot be made.
    """
    self.folder = pathlib.Path(folder)
    self.folder.mkdir(exist_ok=True)
    self._settings = plain(settings)
    here = self._settings["machine"]["device"]
    for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
      entry = _load(path)
      there = entry["settings"]["machine"]["device"] if entry else here
      if there != here:
        raise ValueError(
          f"--out {self.folder} holds results of {there!r}, this is {here!r}: "
          "give another folder"
        )

  def read(self, stage: str) -> dict[str, Any] | None:
    """The result of a stage; None if it is missing, damaged or of others."""
    entry = _load(self.folder / f"{stage}{_SUFFIX}")
    if not entry or entry["settings"] != self._settings:
      return None
    return entry["result"]

  def write(self, stage: str, result: dict[str, Any]) -> None:
    """Stores the result of a stage, in place of an older one."""
    entry = {"stage": stage, "settings": self._settings, "result": result}
    with replacing(self.folder / f"{stage}{_SUFFIX}") as temporary:
      temporary.write_text(strict_json(entry, indent=1) + "\n")


def rows_of(result: dict[str, Any]) -> list[Row]:
  """The rows of a result."""
  return [Row(**row) for row in result.get("rows", ())]


def _load(path: pathlib.Path) -> dict[str, Any] | None:
  """An entry with all that must be in it; None if it is damaged."""
  try:
    entry = read_json(path)
    if entry["stage"] != path.stem:
      return None
    entry["settings"]["machine"]["device"]
    rows_of(entry["result"])
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return None
  return entry
