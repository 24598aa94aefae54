"""Images per second and core of decoding alone, and of a run's transforms."""

import concurrent.futures
import statistics
import time
from collections.abc import Callable
from typing import Any

from moh_jax.config import Config
from moh_jax.data.identity import Identity
from moh_jax.data.pipeline import held_out_images, train_images
from moh_jax.data.sources import CheckedSource, EncodedSource, Record

_MOST_IMAGES = 256  # held in memory, so that no disk is timed
# They stand for a set of this length: Grain takes 0.3 ms to shuffle a number of
# a set of 64, and 3 us from 65,536 on.
_LENGTH = 1 << 20
_ROUND_SECONDS, _ROUNDS = 0.3, 9


class _InMemory(EncodedSource):
  """Some images of a source, their files in memory."""

  fingerprint = ""

  def __init__(self, source: Any):
    self.class_names, self.channels = source.class_names, source.channels
    self._records = [
      source.read(i) for i in range(min(len(source), _MOST_IMAGES))
    ]

  def __len__(self) -> int:
    return _LENGTH

  def read(self, index: int) -> Record:
    return self._records[index % len(self._records)]

  def name(self, index: int) -> str:
    return self.read(index).place

  def identity(self) -> Identity:
    return {"examples": len(self)}


def measure(
  config: Config, source: Any, threads: int, rounds: int = _ROUNDS
) -> dict[str, dict[str, float]]:
  """Times decoding and transforms of image files in turns, in short rounds.

  Args:
    config: of the run, resolved.
    source: of image files.
    threads: that work at the same time, at most the cores of the machine.
    rounds: of each; the medians are taken.

  Returns:
    Of "decode" (whole images), "eval" (that and the transforms of evaluation)
    and "train" (that and those of training): "per_second", images per second
    and thread, and "cpu_ms", milliseconds of a core's work for an image, which
    other programs on the machine lengthen less.
  """
  images = _InMemory(source)
  checked = CheckedSource(images, skip=False)
  train = train_images(config, checked)
  held_out = held_out_images(config, checked)

  def decode(index: int) -> Any:
    record = images.read(index)
    return decode.decode_image(record.content, images.channels, record.place)

  calls: dict[str, Callable[[int], Any]] = {
    "decode": decode,
    "eval": lambda index: held_out[index],
    "train": lambda index: train[index],
  }
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for number in range(rounds + 1):
      for name, call in calls.items():
        timed = _timed(call, pool, threads, number)
        if number:  # the first round opens and fills caches
          found[name].append(timed)
  medians = {
    name: tuple(map(statistics.median, zip(*timed)))
    for name, timed in found.items()
  }
  return {
    name: {"per_second": rate, "cpu_ms": 1e3 * seconds}
    for name, (rate, seconds) in medians.items()
  }


def _timed(
  call: Callable[[int], Any],
  pool: concurrent.futures.Executor,
  threads: int,
  number: int,
) -> tuple[float, float]:
  """Calls per second and thread, and seconds of a core's work for a call."""

  def work(thread: int) -> tuple[float, float]:
    count, began, worked = 0, time.perf_counter(), time.thread_time()
    while (elapsed := time.perf_counter() - began) < _ROUND_SECONDS:
      call(((number * threads + thread) * 7919 + count) % _LENGTH)
      count += 1
    return count / elapsed, (time.thread_time() - worked) / count

  rates, seconds = zip(*pool.map(work, range(threads)))
  return statistics.fmean(rates), statistics.fmean(seconds)
