"""Interleaved timing: what is compared runs in turns in one process."""

import dataclasses
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping

import jax


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
  calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, Timing]:
  """Times functions in turns, so that a slow spell of the machine hits all.

  Args:
    calls: name -> function of JAX arrays without arguments.
    rounds: measured calls of each; one more warms up.

  Returns:
    name -> its times.
  """
  times: dict[str, list[float]] = {name: [] for name in calls}
  for round_ in range(rounds + 1):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      if round_:
        times[name].append(time.perf_counter() - start)
  return {name: _summarize(values) for name, values in times.items()}


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
