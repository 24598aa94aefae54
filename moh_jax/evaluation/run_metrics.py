"""What metrics.jsonl tells: curves, and the load of heads over the steps."""

import dataclasses
import json
import sys

from moh_jax.ops.routing import LOAD_SPLIT
from moh_jax.runtime import steps
from moh_jax.runtime.files import read_bytes

_MOST_BYTES = 1 << 30
_POINTS = 500  # of a curve; more are thinned out

Points = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class RunMetrics:
  """The rows of metrics.jsonl; empty where there is no such file.

  Attributes:
    curves: for each metric its splits, each with pairs of step and value.
    loads: for each layer pairs of the step and the loads of its routed heads.
  """

  curves: dict[str, dict[str, Points]]
  loads: dict[str, list[tuple[int, list[float]]]]


def read_run_metrics(directory: str, last: int) -> RunMetrics:
  """Reads the metrics beside a checkpoint.

  Rows that are damaged, as a killed run may leave them, are left out.

  Args:
    directory: the working directory of the run.
    last: step of the checkpoint; later rows are left out.

  Raises:
    ValueError: the file is too large.
  """
  found = RunMetrics({}, {})
  path = steps.workdir(directory) / "metrics.jsonl"
  if not path.exists():
    return found
  for line in read_bytes(path, _MOST_BYTES).splitlines():
    try:
      row = json.loads(line)
      step, split = row.pop("step"), row.pop("split")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      continue
    if not isinstance(step, int) or step > last:
      continue
    if split == LOAD_SPLIT:
      for name, load in row.items():
        if not _is_load(load):
          continue
        points = found.loads.setdefault(name, [])
        if not points or len(load) == len(points[0][1]):
          points.append((step, load))
      continue
    for name, value in row.items():
      if _is_number(value):
        points = found.curves.setdefault(name, {}).setdefault(str(split), [])
        points.append((step, float(value)))
  for parts in found.curves.values():
    parts |= {split: _thinned(points) for split, points in parts.items()}
  loads = {name: _thinned(points) for name, points in found.loads.items()}
  return RunMetrics(found.curves, loads)


def _is_load(value: object) -> bool:
  return isinstance(value, list) and value and all(map(_is_number, value))


def _is_number(value: object) -> bool:
  """Whether a value is a number that a float can hold, so not NaN."""
  return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _thinned(points: list) -> list:
  """At most `_POINTS` of the points, the last one among them."""
  stride = -(-len(points) // _POINTS)
  return points[::-1][::stride][::-1] if stride > 1 else points
