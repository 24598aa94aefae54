"""The training step of a whole model, with a batch that fills the card."""

import math
import time
from typing import Any

import jax

from moh_jax.config import Config
from moh_jax.data.infer import resolve
from moh_jax.runtime import sharding
from moh_jax.runtime.devices import USABLE
from moh_jax.runtime.sharding import stated_bytes
from moh_jax.speed.card.scale import ModelCase
from moh_jax.speed.model_flops import train_flops
from moh_jax.speed.options import bench_run, with_length
from moh_jax.speed.peaks import published_peak
from moh_jax.training.entrance import check_memory
from moh_jax.training.program import make_program
from moh_jax.training.task import task_builder

_CARD_BYTES = 80e9  # that `ModelCase.batch` is for
_SECONDS = 2.0  # that the timed steps take together, about


class _TooLargeError(Exception):
  """A step needs more memory than there is; the argument is a batch to try."""


def measure(case: ModelCase, peak: float) -> dict[str, Any]:
  """Measures a model's training step.

  It begins with the case's batch, or less on a smaller card, and halves it
  where the step does not fit.

  Args:
    case: which model.
    peak: the device's measured matrix peak, FLOP/s.

  Returns:
    The result of the stage: batch, time, throughput, shares of the peaks and
    memory.

  Raises:
    Exception: of the compiler or the device; also if one example does not fit.
  """
  batch = _first_batch(case.batch)
  while True:
    try:
      return _measure(case, batch, peak)
    except _TooLargeError as error:
      batch = error.args[0]
    except jax.errors.JaxRuntimeError as error:
      if batch == 1 or "RESOURCE_EXHAUSTED" not in str(error):
        raise
      batch //= 2


def _first_batch(batch: int) -> int:
  """A power of two for this card, in proportion to its memory."""
  memory = stated_bytes(jax.devices()[0])
  if memory is None:
    return batch
  fitting = batch * memory / _CARD_BYTES
  return max(1, min(batch, 2 ** math.floor(math.log2(fitting))))


def _measure(case: ModelCase, batch: int, peak: float) -> dict[str, Any]:
  run = _run(case, batch)
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  with sharding.use_mesh(mesh):
    task = task_builder(run).make_task(run)
    program = make_program(run, task, mesh)
    check_memory(run, mesh, program)
    examples = sharding.shard_batch(next(task.batches(mesh)), mesh)
    start = time.perf_counter()
    compiled = program.step.lower(program.state, examples).compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    _check_memory(memory, batch)
    seconds, loss = _time(compiled, program.init(), examples)
  flops, kind = train_flops(run), jax.devices()[0].device_kind
  published = published_peak(kind)
  return {
    "model": case.name,
    "batch": batch,
    "length": case.length,
    "step_ms": seconds * 1e3,
    "unit": task.unit,
    "units_per_second": task.units_per_step / seconds,
    "flops": flops,
    "peak_share": min(1.0, flops / seconds / peak),
    "mfu": flops / seconds / published if published else None,
    "temporary_bytes": memory.temp_size_in_bytes,
    "compile_seconds": compile_seconds,
    "loss": loss,
    "fault": None if math.isfinite(loss) else f"the loss is {loss}",
  }


def _run(case: ModelCase, batch: int) -> Config:
  """A run on random data."""
  run = resolve(bench_run(case.model, batch))
  return with_length(run, case.length) if case.length else run


def _check_memory(memory: Any, batch: int) -> None:
  """Raises `_TooLargeError` if a compiled step will not fit.

  Args:
    memory: the compiler's figures.
    batch: examples per step.
  """
  limit = stated_bytes(jax.devices()[0])
  if limit is None or batch == 1:
    return
  # The outputs take the place of the donated arguments.
  free = USABLE * limit - memory.argument_size_in_bytes
  if memory.temp_size_in_bytes > free:
    fitting = batch * max(free, 0) / memory.temp_size_in_bytes
    smaller = 2 ** math.floor(math.log2(max(fitting, 1)))
    raise _TooLargeError(min(smaller, batch // 2))


def _time(compiled: Any, state: Any, examples: Any) -> tuple[float, float]:
  """Seconds of a step, the mean of some in a row, and its last loss."""
  start = 0.0
  for _ in range(2):  # the first one warms up
    start = time.perf_counter()
    state, metrics = compiled(state, examples)
    jax.block_until_ready(metrics)
  steps = math.ceil(_SECONDS / (time.perf_counter() - start))
  steps = min(max(steps, 3), 30)
  start = time.perf_counter()
  for _ in range(steps):
    state, metrics = compiled(state, examples)
  jax.block_until_ready(metrics)
  return (time.perf_counter() - start) / steps, float(metrics["loss"])
