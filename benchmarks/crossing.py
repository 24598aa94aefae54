"""Up to which share of active heads packing pays, from stored results.

  python -m benchmarks.crossing core/*.json

Reads what `bench attention --json` wrote on a GPU or TPU and prints entries for
`moh_jax/ops/crossovers.json`. Packing pays up to the share at which
its time is that of the fastest form that computes every head. Where both passes
and the forward pass alone were measured, the smaller share counts. Lengths
between measured ones are interpolated; packing is not assumed to pay at shorter
ones, and longer ones have the share of the longest.
"""

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moh_jax.ops.attention import LENGTHS, Crossover
from moh_jax.ops.kernels.attention import has_kernels, kernel_options
from moh_jax.ops.target import target
from moh_jax.training.bench import Row, read_rows


def main() -> None:
  """Prints entries of the files, a line each."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("results", nargs="+", metavar="JSON")
  args = parser.parse_args()
  results = [json.loads(pathlib.Path(p).read_text()) for p in args.results]
  print("\n".join(f"{entry.line()}," for entry in crossovers(results)))


def crossovers(results: Iterable[Mapping[str, Any]]) -> list[Crossover]:
  """Entries for the table, one for each form, dtype, head dim and direction.

  Args:
    results: of `bench attention` on this device.
  """
  parts: dict[tuple[int, str], list[Row]] = {}
  for result in results:
    key = result["settings"]["head_dim"], result["settings"]["dtype"]
    parts.setdefault(key, []).extend(read_rows(result))
  entries = []
  for (dim, dtype), rows in sorted(parts.items()):
    backends = {"packed": "xla"}
    if has_kernels(target(), dtype, dim):
      options = kernel_options(target(), dtype, dim)
      backends["kernel"] = options["backend"]
    for form, causal in itertools.product(backends, (False, True)):
      packing = [
        row
        for row in rows
        if row.implementation == form
        and (row.computed_share or 1) < 1
        and row.ratio_to_mha is not None
        and row.fault is None
        and ("causal" in row.mode) == causal
      ]
      if shares := _by_length(packing):
        found = [_at(length, shares) for length in LENGTHS]
        kind = packing[0].device, backends[form], [dtype], dim, causal
        entries.append(Crossover(*kind, found, measured=True))
  return entries


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
  points: dict[tuple[int, str], list[tuple[float, float]]] = {}
  for row in rows:
    found = points.setdefault((row.length, row.mode), [])
    found.append((row.share, row.ratio_to_mha))
  shares: dict[int, float] = {}
  for (length, _), found in points.items():
    shares[length] = min(crossing(found), shares.get(length, 1.0))
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


if __name__ == "__main__":
  main()
