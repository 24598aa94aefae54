"""From measured rows to the table of `ops.crossovers`.

Packing pays up to the share of active heads at which its time is that of the
fastest form that computes every head.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from moh_jax.ops.crossovers import LENGTHS, Crossover
from moh_jax.speed.report import Row


@dataclasses.dataclass(frozen=True)
class Measured:
  """Rows of the core with one head dim.

  Attributes:
    head_dim: D.
    dtype: name of the queries' dtype.
    rows: of `bench attention`.
  """

  head_dim: int
  dtype: str
  rows: Sequence[Row]


def crossovers(
  measured: Iterable[Measured], backends: Mapping[str, str]
) -> list[Crossover]:
  """Entries for the table, one for each form, dtype, head dim and direction.

  Where both passes and the forward pass alone were measured, the smaller share
  counts, so that packing pays in both. Lengths between measured ones are
  interpolated; packing is not assumed to pay at shorter ones, and longer ones
  have the share of the longest.

  Args:
    measured: what was measured.
    backends: the back end of each form that packs, as in `Crossover`.
  """
  entries = []
  for part in measured:
    for form, causal in itertools.product(backends, (False, True)):
      rows = [
        row
        for row in part.rows
        if row.implementation == form
        and row.every_head is False
        and row.ratio_to_mha is not None
        and row.fault is None
        and ("causal" in row.mode) == causal
      ]
      shares = _by_length(rows)
      if not shares:
        continue
      entries.append(
        Crossover(
          rows[0].device,
          backends[form],
          (part.dtype,),
          part.head_dim,
          causal,
          tuple(_at(length, shares) for length in LENGTHS),
          measured=True,
        )
      )
  return entries


def lines(entries: Iterable[Crossover]) -> list[str]:
  """Source text of entries, one line each."""
  return [f"{entry!r}," for entry in entries]


def crossing(points: Sequence[tuple[float, float]]) -> float:
  """The share at which a ratio reaches 1.

  Args:
    points: (share, ratio) pairs, at least one.

  Returns:
    By linear interpolation between the last share that pays and the next, or
    along the line through the two nearest points beyond either end; in [0, 1].
    With a single point, its share if it pays, else 0.
  """
  points = sorted(points)
  paying = [i for i, (_, ratio) in enumerate(points) if ratio <= 1]
  if len(points) == 1:
    return points[0][0] if paying else 0.0
  last = max(paying, default=-1)
  first = min(max(last, 0), len(points) - 2)
  (low, start), (high, end) = points[first], points[first + 1]
  if end <= start:  # noise: it should grow with the share
    return points[last][0] if paying else 0.0
  share = low + (1 - start) * (high - low) / (end - start)
  return round(min(1.0, max(0.0, share)), 2)


def _by_length(rows: Sequence[Row]) -> dict[int, float]:
  """The share up to which packing pays in all modes, by length."""
  shares: dict[int, float] = {}
  for (length, _), group in itertools.groupby(
    sorted(rows, key=lambda row: (row.length, row.mode)),
    key=lambda row: (row.length, row.mode),
  ):
    share = crossing([(row.share, row.ratio_to_mha) for row in group])
    shares[length] = min(share, shares.get(length, 1.0))
  return shares


def _at(length: int, shares: Mapping[int, float]) -> float:
  """The share of a length, interpolated linearly in its logarithm."""
  known = sorted(shares)
  if length < known[0]:
    return 0.0
  above = next((n for n in known if n >= length), known[-1])
  below = max((n for n in known if n <= length), default=above)
  if above <= below:
    return shares[below]
  part = math.log(length / below) / math.log(above / below)
  between = shares[below] + part * (shares[above] - shares[below])
  return round(between, 2)
