"""What a layer's time should be, by the time of its core in the same run."""

from collections.abc import Iterable, Sequence

from moh_jax.speed.report import Row


def expectations(
  layers: Iterable[Row], cores: Sequence[Row]
) -> list[tuple[Row, float]]:
  """Applies Amdahl's law to layers: only the time of the core changes.

  A layer should take the time of multi-head attention's layer, less the core of
  multi-head attention, plus the fastest core for its share of heads. The router
  is in neither, so what it takes comes on top.

  Args:
    layers: rows of `bench layer`.
    cores: rows of `bench attention` with the same batch, heads and head dim.

  Returns:
    Each row of a layer in the form "auto", beside the ratio to multi-head
    attention that is expected of it. Rows whose core was not measured are left
    out.
  """
  layers, found = list(layers), []
  for row in layers:
    place = row.mode, row.length
    whole = _fastest(layers, *place, 1.0)
    every, active = (
      _fastest(cores, *place, share) for share in (1.0, row.share)
    )
    if row.implementation != "auto" or row.every_head or row.ms is None:
      continue
    if whole and every and active:
      found.append((row, (whole - every + active) / whole))
  return found


def _fastest(
  rows: Sequence[Row], mode: str, length: int | None, share: float
) -> float | None:
  """Milliseconds of the fastest form of a share; None if none was timed."""
  times = [
    row.ms
    for row in rows
    if (row.mode, row.length, row.share) == (mode, length, share)
    and row.ms is not None
  ]
  return min(times, default=None)
