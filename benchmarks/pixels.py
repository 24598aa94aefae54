"""Times decoding image files, and the transforms of a config, from memory.

python -m benchmarks.pixels --config configs/vit.py:s80 \
    --config.data.path=PHOTOS
"""

import concurrent.futures
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import finish, make_parser
from moh_jax.cli.flags import split_changes
from moh_jax.config import Config
from moh_jax.data.decode import decode_image
from moh_jax.data.infer import resolve
from moh_jax.data.pipeline import held_out_images, train_images
from moh_jax.data.sources import (
  CheckedSource,
  EncodedSource,
  Record,
  make_source,
)
from moh_jax.runtime.steps import load_config

_IMAGES = 256  # held in memory, so that no disk is timed
# They stand for a set of this length: Grain takes 0.3 ms to shuffle a number of
# a set of 64, and 3 us from 65,536 on.
_LENGTH = 1 << 20
_SECONDS = 0.3  # of a round


class _InMemory(EncodedSource):
  """Some images of a source, their files in memory."""

  fingerprint = ""

  def __init__(self, source: Any):
    self.class_names, self.channels = source.class_names, source.channels
    number = min(len(source), _IMAGES)
    self._records = [source.read(i) for i in range(number)]

  def __len__(self) -> int:
    return _LENGTH

  def read(self, index: int) -> Record:
    return self._records[index % len(self._records)]

  def name(self, index: int) -> str:
    return self.read(index).place


def main(argv: Sequence[str] | None = None) -> int:
  """Prints images per second and thread, and CPU time of an image."""
  argv, changes = split_changes(sys.argv[1:] if argv is None else argv)
  parser = make_parser(__doc__, rounds=9)
  parser.add_argument("--config", required=True, metavar="FILE[:ARG]")
  args = parser.parse_args(argv)
  config = resolve(load_config(args.config, changes))
  finish(args, measure(config, args.rounds))
  return 0


def measure(config: Config, rounds: int) -> list[dict[str, Any]]:
  """Times decoding alone, and with either split's transforms, in turns.

  "cpu_ms" are milliseconds of a core's work for an image, which other programs
  on the machine lengthen less; the medians of the rounds are taken.
  """
  images = _InMemory(make_source(config, "train"))
  checked = CheckedSource(images, skip=False)

  def decode(index: int) -> Any:
    record = images.read(index)
    return decode_image(record.content, images.channels, record.place)

  calls: dict[str, Callable[[int], Any]] = {
    "decode": decode,
    "eval": held_out_images(config, checked).__getitem__,
    "train": train_images(config, checked).__getitem__,
  }
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
  threads = config.data.num_threads
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for number in range(rounds + 1):
      for name, call in calls.items():
        starts = [(number * threads + i) * 7919 for i in range(threads)]
        times = zip(*pool.map(_work, [call] * threads, starts))
        if number:  # the first round opens and fills caches
          found[name].append(tuple(map(statistics.fmean, times)))
  rows = []
  for name, times in found.items():
    rate, seconds = map(statistics.median, zip(*times))
    rows.append({"what": name, "per_second": rate, "cpu_ms": 1e3 * seconds})
  return rows


def _work(call: Callable[[int], Any], start: int) -> tuple[float, float]:
  """Calls per second of a thread, and seconds of a core's work for a call."""
  count, began, worked = 0, time.perf_counter(), time.thread_time()
  while (elapsed := time.perf_counter() - began) < _SECONDS:
    call((start + count) % _LENGTH)
    count += 1
  return count / elapsed, (time.thread_time() - worked) / count


if __name__ == "__main__":
  sys.exit(main())
