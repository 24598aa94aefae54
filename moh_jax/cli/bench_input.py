"""Times the stages between disk and train step."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax

from moh_jax.config import Config
from moh_jax.data.pipeline import TrainBatches, train_recipe
from moh_jax.data.sources import make_source
from moh_jax.runtime import sharding
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

# What one thread does for an example, one stage after the other.
_OF_ONE_THREAD = ("read", "decode", "transform", "batch")
# What a run does at the same time; the slowest decides.
_AT_ONCE = ("input", "to device", "step")


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
    the slowest part of the input where that is it.
  """
  mesh = sharding.make_mesh(config.mesh)
  task = task_builder(config).make_task(config)
  size = config.data.batch_size
  rates = _one_thread(config, task, size * min(batches, 4))
  with sharding.use_mesh(mesh):
    stream: TrainBatches = task.batches(mesh)
    next(stream)  # opens files, starts threads and processes
    rates["input"] = size * _rate(lambda _: next(stream), batches)
    batch = next(stream)
    stream.close()

    def send(_: int) -> Any:
      return jax.block_until_ready(sharding.shard_batch(batch, mesh))

    rates["to device"] = size * _rate(send, batches)
    program, sent = make_program(config, task, mesh), send(0)
    state = [program.init()]

    def take(_: int) -> None:
      state[0], metrics = program.step(state[0], sent)
      jax.device_get(metrics)

    take(0)  # compiles
    rates["step"] = size * _rate(take, steps)
  slowest = min(_AT_ONCE, key=rates.get)
  if slowest == "input":
    parts = [name for name in _OF_ONE_THREAD if name in rates]
    slowest = f"input ({min(parts, key=rates.get)})"
  return {"examples_per_second": rates, "bottleneck": slowest}


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
    rates["read"] = _rate(read, count)
    again = _timed(read, count)[1]
  examples, whole = _timed(lambda i: source[i % len(source)], count)
  rates["decode" if again else "read"] = count / max(whole - again, 1e-9)
  made = grain.MapDataset.source(examples).seed(0).apply(train_recipe(config))
  ready, seconds = _timed(made.__getitem__, count)
  rates["transform"] = count / seconds
  return {**rates, "batch": count / _batching(ready)}


def _batching(examples: Sequence[Any]) -> float:
  """Seconds to make a batch of examples."""
  batch = grain.MapDataset.source(examples).batch(len(examples))
  return _timed(batch.__getitem__, 1)[1]


def _rate(call: Callable[[int], Any], count: int) -> float:
  """Calls per second."""
  return count / _timed(call, count)[1]


def _timed(call: Callable[[int], Any], count: int) -> tuple[list[Any], float]:
  """Results of `call` on the first numbers, and the seconds of all of them."""
  call(0)
  began = time.perf_counter()
  results = [call(i) for i in range(count)]
  return results, time.perf_counter() - began
