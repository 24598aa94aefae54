"""Times a run: its model beside its multi-head baseline, and its input.

Of the model "forward" computes the training loss of one batch of random data,
"forward_backward" its gradients too. The baseline is the same network with the
router off. Of language models the reading of a prompt ("prefill") and the
generating of tokens ("decode_B", a token for each of B prompts) are timed too.
The same can be predicted for devices that are not here.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import Config, get_family, without_router
from moh_jax.config.llm import Sampling
from moh_jax.data.pipeline import TrainBatches, train_recipe
from moh_jax.data.sources import make_source
from moh_jax.inference import decoding, generate
from moh_jax.inference.generate import batch_bucket, length_bucket
from moh_jax.models.llm import LLM
from moh_jax.models.registry import make_model
from moh_jax.ops.target import target
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import init_params, unbox
from moh_jax.training.bench import Program, Row, compile_program, time_rows
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

_SPAN = 32  # tokens that one call of the decoding program generates
_BATCHES = (1, 8)  # of texts that are generated
# What one thread does for an example, one stage after the other.
_OF_ONE_THREAD = ("read", "decode", "transform", "batch")
# What a run does at the same time; the slowest decides.
_AT_ONCE = ("input", "to device", "step")
_Made = tuple[Program, str, float]  # with its form and the heads it computes


def measure_model(run: Config, length: int | None, rounds: int) -> list[Row]:
  """Measures a model and its baseline in turns.

  Args:
    run: on random data.
    length: what the rows say of it.
    rounds: measured turns.
  """
  form = run.model.attention_impl
  runs, modes = _pair(run, form), [(_training, run.data.batch_size)]
  modes += [(_writing, batch) for batch in _batches(run)]
  rows = []
  for make, batch in modes:
    made = {name: dict(make(one, batch)) for name, one in runs.items()}
    for mode in made[form]:
      known, programs = [], []
      for name, one in runs.items():
        program, used, computed = made[name][mode]
        programs.append(program)
        known.append(
          Row(
            *(target().kind, "model", mode, length),
            *(one.model.activated_share, name),
            form=used,
            computed_share=computed,
          )
        )
      new = 1
      if run.model.READS_TEXT and not mode.startswith("decode"):
        new = run.data.sequence_length
      rows += time_rows(
        *(known, programs),
        mha=[1],
        units=batch * new,
        rounds=rounds,
        min_seconds=0.0,
      )
  return rows


def _pair(run: Config, name: str) -> dict[str, Config]:
  """A run by a name, and its multi-head baseline."""
  mha = dataclasses.replace(run, model=without_router(run.model))
  return {name: run, "mha": mha}


def _batches(run: Config) -> tuple[int, ...]:
  """Numbers of texts that a model writes at a time; none for images."""
  writes = "generate" in get_family(run.model.family).commands
  return _BATCHES if writes else ()


def random_params(run: Config) -> Any:
  """Initial parameters of a run's network plus 0.02, so that few are zero.

  With the zeros that adaLN-Zero starts from, gradients would be zero and a
  backward pass could skip work.
  """
  model, abstract = make_model(run)
  inputs = [jnp.zeros(x.shape, x.dtype) for x in abstract]
  init = jax.jit(lambda: unbox(init_params(model, jax.random.key(1), inputs)))
  return jax.tree.map(lambda x: x + 0.02, init())


def _training(run: Config, _: int) -> Iterator[tuple[str, _Made]]:
  """The training loss of a random batch, and its gradients."""
  task = task_builder(run).make_task(run)
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  batch = jax.tree.map(jnp.asarray, next(task.batches(mesh)))
  arrays = (random_params(run), batch, jax.random.key(0), jnp.int32(0))
  form = "", run.model.activated_share

  def forward(*arrays: Any) -> jax.Array:
    return task.loss_fn(*arrays)[0]

  yield "forward", (compile_program(forward, *arrays), *form)
  backward = compile_program(jax.grad(forward), *arrays)
  yield "forward_backward", (backward, *form)


def _writing(run: Config, batch: int) -> Iterator[tuple[str, _Made]]:
  """The reading of `batch` prompts, and the generating after them.

  The sequence length of the run is that of the prompts; the cache holds `_SPAN`
  tokens more. Every call of decoding writes them over those of the one before,
  so that none of them reads the prompts again.
  """
  config, length = run.model, run.data.sequence_length
  model = LLM(config, unrolled=True)
  params = generate.serving_params(random_params(run), config)
  read = decoding.make_prefill(model, generate.default_cache_dtype(config))
  write = decoding.make_decode(model, (), _SPAN)
  rows = batch_bucket(batch, config)
  prompts = (
    np.ones((rows, length), np.int32),
    np.zeros(rows, np.int32),
    np.arange(rows, dtype=np.int32),
    np.zeros(rows, bool),
  )
  endless = Sampling(max_new_tokens=2**30)
  numbers = decoding.span_numbers(endless, _SPAN)

  def prefill() -> Any:
    slots = length_bucket(length + _SPAN)
    return read(params, *prompts, slots)

  state = [jax.block_until_ready(prefill())]
  start = np.int32(state[0].slot)

  def decode() -> jax.Array:
    again = dataclasses.replace(state[0], slot=start)
    state[0], tokens, _ = write(params, again, numbers, True, False)
    return tokens

  if batch == 1:  # in the form of training: there is no cache to attend to
    data = dataclasses.replace(run.data, batch_size=rows)
    one = dataclasses.replace(run, data=data)
    yield "prefill", (Program(prefill), "", one.model.activated_share)
  program = Program(decode, _SPAN)
  yield f"decode_{batch}", (program, "", config.activated_share)


def measure_input(config: Config, batches: int, steps: int) -> dict[str, Any]:
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
