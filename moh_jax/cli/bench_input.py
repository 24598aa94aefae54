"""`python -m moh_jax bench input`: the stages between disk and train step."""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.config import Config
from moh_jax.config.registry import sources_with
from moh_jax.data.decode import decode_image
from moh_jax.data.identity import Identity
from moh_jax.data.image_folders import EncodedSource, Record
from moh_jax.data.infer import resolve
from moh_jax.data.pipeline import (
  TrainBatches,
  held_out_images,
  train_images,
  train_recipe,
)
from moh_jax.data.sources import CheckedSource, make_source
from moh_jax.runtime import sharding
from moh_jax.training import timing
from moh_jax.training.feed import Feed
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

# What one thread does for an example, one stage after the other.
_OF_ONE_THREAD = ("read", "decode", "transform", "batch")
# What a run does at the same time; the slowest decides.
_AT_ONCE = ("input", "to device", "step")
_MOST_IMAGES = 256  # held in memory, so that no disk is timed
# They stand for a set of this length: Grain takes 0.3 ms to shuffle a number of
# a set of 64, and 3 us from 65,536 on.
_LENGTH = 1 << 20
_ROUND_SECONDS, _ROUNDS = 0.3, 9


def run(args: argparse.Namespace) -> int:
  """Prints examples per second by stage, and which stage is the slowest."""
  config = resolve(args.config)
  if args.pixels:
    pixels = _pixels_of(config)
    measured, lines = {"pixels": pixels}, _pixel_lines(pixels)
  else:
    measured = measure(config, args.batches, args.steps)
    lines = _stage_lines(measured)
  if args.json != "-":
    print(lines)
  settings = {"config": config_lib.to_dict(config)}
  common.write_json(
    args.json,
    {"machine": timing.machine(), "settings": settings, **measured},
  )
  return 0


def _stage_lines(measured: dict[str, Any]) -> str:
  rates = measured["examples_per_second"]
  rows = [(stage, f"{rate:,.0f}") for stage, rate in rates.items()]
  return (
    f"{common.table(rows, ('stage', 'examples/s'))}\n"
    f"bottleneck: {measured['bottleneck']}\n"
    f"main thread: {measured['main_thread_share']:.2%} of a step is its work "
    f"on input, {measured['waiting_share']:.2%} it waits for input"
  )


def _pixel_lines(times: dict[str, dict[str, float]]) -> str:
  whole = times["decode"]
  rows = [
    (
      what,
      f"{times[name]['per_second']:,.0f}",
      f"{times[name]['per_second'] / whole['per_second']:.0%}",
      f"{times[name]['cpu_ms']:.2f}",
      f"{whole['cpu_ms'] / times[name]['cpu_ms']:.0%}",
    )
    for name, what in (
      ("decode", "decoding alone"),
      ("eval", "and transforms of evaluation"),
      ("train", "and transforms of training"),
    )
  ]
  names = "from memory", "images/s and thread", "share", "CPU ms/image", "share"
  return common.table(rows, names)


def measure(config: Config, batches: int, steps: int) -> dict[str, Any]:
  """Times the stages of a run's input, and its step.

  "read", "decode", "transform" and "batch" are those of one thread. "input" is
  all of them with the threads or worker processes of the config, "to device"
  the transfer, "step" the train step on a batch that is there.

  Args:
    config: of the run, resolved.
    batches: to time the input with.
    steps: to time the train step with.

  Returns:
    "examples_per_second" by stage; "bottleneck", the name of the slowest, with
    the slowest part of the input where that is it; "main_thread_share", the
    main thread's own work on input over the time of a step; "waiting_share",
    how much of the run's time it waits for input.
  """
  mesh = sharding.make_mesh(config.mesh)
  task = task_builder(config).make_task(config)
  size = config.data.batch_size
  rates = _one_thread(config, task, size * min(batches, 4))
  with sharding.use_mesh(mesh):
    stream: TrainBatches = task.batches(mesh)
    next(stream)  # opens files, starts threads and processes
    rates["input"] = size / _seconds(lambda: next(stream), batches)
    batch = next(stream)
    stream.close()
    sent = [jax.block_until_ready(sharding.shard_batch(batch, mesh))]
    rates["to device"] = size / _seconds(
      lambda: jax.block_until_ready(sharding.shard_batch(batch, mesh)), batches
    )
    program = make_program(config, task, mesh)
    state = [program.init()]

    def take(batch: Any) -> None:
      state[0], metrics = program.step(state[0], batch)
      jax.device_get(metrics)

    take(sent[0])  # compiles
    rates["step"] = size / _seconds(lambda: take(sent[0]), steps)
    feed = Feed(task.batches(mesh), mesh, config.data.device_prefetch)
    try:
      shares = _main_thread(feed, take, steps)
    finally:
      feed.close()
  slowest = min(_AT_ONCE, key=rates.get)
  if slowest == "input":
    parts = [name for name in _OF_ONE_THREAD if name in rates]
    slowest = f"input ({min(parts, key=rates.get)})"
  return {"examples_per_second": rates, "bottleneck": slowest, **shares}


def _one_thread(config: Config, task: Any, count: int) -> dict[str, float]:
  """Examples per second of what threads do, for `count` examples."""
  if hasattr(config.data, "sequence_length"):
    # A batch is made of sequences that are read as they are used.
    one = task.batches(sharding.make_mesh(config.mesh)).examples
    examples, seconds = _timed(one.__getitem__, count)
    return {"read": count / seconds, "batch": count / _batching(examples)}
  source = make_source(config, "train")
  rates = {}
  rates, again = {}, 0.0
  if hasattr(source, "read"):

    def read(i: int) -> Any:
      return source.read(i % len(source))

    # The first time may wait for a disk, which is no part of decoding.
    rates["read"] = count / _timed(read, count)[1]
    again = _timed(read, count)[1]
  examples, whole = _timed(lambda i: source[i % len(source)], count)
  rates["decode" if again else "read"] = count / max(whole - again, 1e-9)
  made = grain.MapDataset.source(examples).seed(0).apply(train_recipe(config))
  ready, seconds = _timed(made.__getitem__, count)
  return {
    **rates,
    "transform": count / seconds,
    "batch": count / _batching(ready),
  }


def _batching(examples: Sequence[Any]) -> float:
  batch = grain.MapDataset.source(examples).batch(len(examples))
  return _timed(batch.__getitem__, 1)[1]


def _timed(call: Callable[[int], Any], count: int) -> tuple[list[Any], float]:
  """Results of `call` on the first numbers, and the seconds of all of them."""
  call(0)
  began = time.perf_counter()
  results = [call(i) for i in range(count)]
  return results, time.perf_counter() - began


def _seconds(call: Callable[[], Any], count: int) -> float:
  """Mean seconds of a call."""
  return _timed(lambda _: call(), count)[1] / count


def _main_thread(
  feed: Feed, take: Callable[[Any], None], steps: int
) -> dict[str, float]:
  """Shares of the main thread's work on input, and of its waiting."""
  take(next(feed))
  work, waited, began = 0.0, feed.waited, time.perf_counter()
  for _ in itertools.repeat(None, steps):
    before = time.thread_time()
    batch = next(feed)
    work += time.thread_time() - before
    take(batch)
  elapsed = time.perf_counter() - began
  return {
    "main_thread_share": work / elapsed,
    "waiting_share": (feed.waited - waited) / elapsed,
  }


def _pixels_of(config: Config) -> dict[str, dict[str, float]]:
  """`measure_pixels` of a config whose images are files.

  Raises:
    ValueError: they are not.
  """
  decoded = sources_with(config_lib.DataConfig, "decode")
  if config.data.source not in decoded:
    raise ValueError(
      f"--pixels: data.source={config.data.source!r} must be one of "
      f"{decoded}, whose images are decoded"
    )
  threads = min(config.data.num_threads, os.cpu_count() or 1)
  return measure_pixels(config, make_source(config, "train"), threads)


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


def measure_pixels(
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
    return decode_image(record.content, images.channels, record.place)

  calls: dict[str, Callable[[int], Any]] = {
    "decode": decode,
    "eval": lambda index: held_out[index],
    "train": lambda index: train[index],
  }
  found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for number in range(rounds + 1):
      for name, call in calls.items():
        timed = _round(call, pool, threads, number)
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


def _round(
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
