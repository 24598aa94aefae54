"""Interleaved timing: what is compared runs in turns in one process."""

import dataclasses
import math
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping

import jax

_MOST_REPEATS = 1000


@dataclasses.dataclass(frozen=True)
class Timing:
  """Times of one function.

  Attributes:
    median: seconds.
    spread: (75th - 25th percentile) / median.
  """

  median: float
  spread: float


def interleaved(
  calls: Mapping[str, Callable[[], object]], rounds: int, least: float = 0.0
) -> dict[str, Timing]:
  """Times functions in turns, so that a slow spell of the machine hits all.

  Args:
    calls: name -> function of JAX arrays without arguments.
    rounds: measured turns of each; one more call warms up.
    least: seconds that a turn should take: shorter calls are repeated in it.

  Returns:
    name -> its times of one call.
  """
  repeats = {name: _repeats(call, least) for name, call in calls.items()}
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      times[name].append(_seconds(call, repeats[name]))
  return {name: _summarize(values) for name, values in times.items()}


def _repeats(call: Callable[[], object], least: float) -> int:
  """Warms up, and counts the calls of a turn."""
  _seconds(call)
  if not least:
    return 1
  return min(math.ceil(least / _seconds(call)), _MOST_REPEATS)


def _seconds(call: Callable[[], object], repeats: int = 1) -> float:
  """Of one call, mean of some."""
  start = time.perf_counter()
  for _ in range(repeats):
    jax.block_until_ready(call())
  return (time.perf_counter() - start) / repeats


def _summarize(values: list[float]) -> Timing:
  median = statistics.median(values)
  if len(values) < 2:
    return Timing(median, 0.0)
  low, _, high = statistics.quantiles(values, n=4)
  return Timing(median, (high - low) / median)


def machine() -> dict[str, object]:
  """Names the machine that a result comes from."""
  device = jax.devices()[0]
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "cpu": _cpu_model(),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
  }


def peak_resident_bytes() -> int:
  """Largest resident memory of this process so far."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_model() -> str:
  try:
    with open("/proc/cpuinfo") as stream:
      names = [line for line in stream if line.startswith("model name")]
    return names[0].partition(":")[2].strip()
  except (OSError, IndexError):
    return platform.processor()
