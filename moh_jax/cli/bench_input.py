"""Times the stages between disk and train step."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax

from moh_jax.cli.options import table
from moh_jax.config import Config
from moh_jax.data.pipeline import (
  TrainBatches,
  train_recipe,
)
from moh_jax.data.sources import make_source
from moh_jax.runtime import sharding
from moh_jax.training.feed import Feed
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

# What one thread does for an example, one stage after the other.
_OF_ONE_THREAD = ("read", "decode", "transform", "batch")
# What a run does at the same time; the slowest decides.
_AT_ONCE = ("input", "to device", "step")


def lines(measured: dict[str, Any]) -> Iterator[str]:
  """The result of `measure` for people."""
  rates = measured["examples_per_second"]
  rows = [(stage, f"{rate:,.0f}") for stage, rate in rates.items()]
  yield table(rows, ("stage", "examples/s"))
  yield f"bottleneck: {measured['bottleneck']}"
  yield (
    f"main thread: {measured['main_thread_share']:.2%} of a step is its work "
    f"on input, {measured['waiting_share']:.2%} it waits for input"
  )


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
