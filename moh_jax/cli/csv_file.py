"""Tables as CSV files."""

import csv
import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from moh_jax.runtime.files import write_whole


def write_csv(
  target: str, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
  """Writes a table as a CSV file, whole or not at all."""
  text = io.StringIO()
  writer = csv.writer(text)
  writer.writerow(header)
  writer.writerows(rows)
  content = text.getvalue().encode(errors="surrogateescape")
  path = pathlib.Path(target)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, content)
