"""Time a model beside its multi-head baseline, or a run's input."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.config import Config, get_family
from moh_jax.config.base import Count
from moh_jax.config.dit import FLOW
from moh_jax.config.parse import changed
from moh_jax.runtime import steps
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  from collections.abc import Callable, Iterator

  # Name, what one call of it does, and of how many things: tokens or images.
  _Calls = Iterator[tuple[str, Callable[[], Any], int]]

_LENGTH = 512  # tokens of the sequences that models are timed with
_BATCH = 4  # images or sequences
_TEXTS = (1, 8)  # that are generated at a time
_SPAN = 32  # tokens that one call of the decoding program generates
_BATCHES, _STEPS = 20, 10  # to time inputs and steps with
_EMA_DECAY = 0.9999  # of the released recipe of diffusion models


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(command.RunConfig, command.Output):
  """Time a model and its multi-head baseline on random data, in turns.

  The passes: the training loss (forward), its gradients too
  (forward_backward), reading a prompt and writing after it (prefill, decode_B
  of B texts), a sampler's step. --config.KEY=VALUE changes a key of what is
  timed, such as --config.data.batch_size=8 (of 4 examples),
  --config.model.dtype=bfloat16, or --config.data.sequence_length=1024 (of 512
  tokens, or the model's longest sequence).

  Attributes:
    model: released name of the model, where --config is not given.
    config: config file of the run, as FILE or FILE:ARG; its data need not
      exist.
    rounds: measured turns.
  """

  model: str = "moh-vit-s80"
  config: command.Place | None = None
  rounds: Count = 7

  def check(self) -> None:
    """The model is known; keys of a released one can be changed too."""
    config_lib.released_model(self.model)

  @functools.cached_property
  def loaded(self) -> Config:
    """The config of --config; the changes are of what is timed."""
    return steps.load_config(self.config, ())

  def timed(self) -> Config:
    """The run on random data that is timed."""
    from moh_jax.data.infer import resolve, resolve_without_data

    if self.config is None:
      run = bench_run(config_lib.released_model(self.model), _BATCH)
    else:
      own = resolve_without_data(self.loaded)[0]
      run = bench_run(own.model, _BATCH)
      run = dataclasses.replace(run, sections=own.sections)
    return changed(resolve(run), self.changes)


def bench_run(model: Any, batch: int) -> Config:
  """A run of a model section on random data, `batch` examples per step.

  Language models read 512 tokens, or their longest sequence if that is shorter;
  diffusion models keep averaged parameters.
  """
  data, others = {"batch_size": batch}, {}
  if model.READS_TEXT:
    data["sequence_length"] = min(_LENGTH, model.max_length)
  if "diffusion" in model.SECTIONS:
    others["optim"] = config_lib.OptimConfig(ema_decay=_EMA_DECAY)
  return Config(model=model, data=model.DATA(**data), **others)


@alive("measuring")
def run_model(options: ModelOptions) -> int:
  """Prints a row for each pass: both times, their ratio and its spread."""
  run = options.timed()
  rows = measure_model(run, options.rounds)
  cells = [
    (
      row["mode"],
      *(f"{row[name]:.3f}" for name in ("ms", "mha_ms")),
      f"{row['ratio']:.3f} ± {row['ratio'] * row['spread'] / 2:.3f}",
      *(f"{row[name]:,.2f}" for name in ("units_per_second", "mha_per_second")),
    )
    for row in rows
  ]
  header = ("pass", "ms", "MHA ms", "time over MHA", "units/s", "MHA units/s")
  share = f"{run.model.activated_share:.1%} of the heads active"
  values = {"config": config_lib.to_dict(run), "rows": rows}
  options.give(values, [share, command.table(cells, header)])
  return 0


def measure_model(run: Config, rounds: int) -> list[dict[str, Any]]:
  """Measures a model and the same one without a router, pass by pass.

  Args:
    run: on random data.
    rounds: measured turns.

  Returns:
    Rows of "mode", "ms" and "mha_ms", "ratio" and its "spread" ((75th - 25th
    percentile) / median), "units_per_second" and "mha_per_second".
  """
  from moh_jax.training.bench import interleaved

  mha = dataclasses.replace(run, model=config_lib.without_router(run.model))
  passes = [(_training, run.data.batch_size)]
  if "sample" in run.sections:
    passes.append((_sampling, run.data.batch_size))
  if "generate" in get_family(run.model.family).commands:
    passes += [(_writing, texts) for texts in _TEXTS]
  rows = []
  for make, batch in passes:
    pairs = zip(make(run, batch), make(mha, batch))
    for (mode, ours, units), (_, theirs, _) in pairs:
      times = interleaved({"moh": ours, "mha": theirs}, rounds)
      moh, dense = times["moh"], times["mha"]
      ratio, of_call = moh.over(dense), _SPAN if "decode" in mode else 1
      rows.append(
        {
          "mode": mode,
          "ms": moh.median / of_call * 1e3,
          "mha_ms": dense.median / of_call * 1e3,
          "ratio": ratio.median,
          "spread": ratio.spread,
          "units_per_second": units / moh.median,
          "mha_per_second": units / dense.median,
        }
      )
  return rows


def random_params(run: Config) -> Any:
  """Initial parameters of a run's network plus 0.02, so that few are zero.

  With the zeros that adaLN-Zero starts from, gradients would be zero and a
  backward pass could skip work.
  """
  import jax
  import jax.numpy as jnp

  from moh_jax.models.registry import make_model
  from moh_jax.runtime.parameters import init_params, unbox

  model, abstract = make_model(run)
  inputs = [jnp.zeros(x.shape, x.dtype) for x in abstract]
  init = jax.jit(lambda: unbox(init_params(model, jax.random.key(1), inputs)))
  return jax.tree.map(lambda x: x + 0.02, init())


def _training(run: Config, batch: int) -> _Calls:
  """The training loss of a random batch, and its gradients."""
  import jax
  import jax.numpy as jnp

  from moh_jax.runtime.mesh import make_mesh
  from moh_jax.training.task import task_builder

  task = task_builder(run).make_task(run)
  mesh = make_mesh(run.mesh, jax.devices()[:1])
  examples = jax.tree.map(jnp.asarray, next(task.batches(mesh)))
  arrays = (random_params(run), examples, jax.random.key(0), jnp.int32(0))

  def loss(*arrays: Any) -> jax.Array:
    return task.loss_fn(*arrays)[0]

  units = batch * getattr(run.data, "sequence_length", 1)
  for mode, function in (
    ("forward", loss),
    ("forward_backward", jax.grad(loss)),
  ):
    compiled = jax.jit(function).lower(*arrays).compile()
    yield mode, functools.partial(compiled, *arrays), units


def _sampling(run: Config, batch: int) -> _Calls:
  """One step of the run's sampler, with its guidance."""
  import jax
  import jax.numpy as jnp

  from moh_jax.models.generation import make_sampler
  from moh_jax.models.registry import make_model

  method = "euler" if run.diffusion.schedule == FLOW else "ddim"
  one = config_lib.apply_overrides(run, "sample", steps="1", method=method)
  draw = jax.jit(make_sampler(make_model(one)[0], one))
  index = jnp.arange(batch, dtype=jnp.int32)
  labels = index % run.model.num_classes
  call = functools.partial(draw, random_params(run), 0, index, labels)
  yield "sampling_step", call, batch


def _writing(run: Config, texts: int) -> _Calls:
  """The reading of prompts, and the generating of tokens after them.

  The sequence length of the run is that of the prompts; the cache holds `_SPAN`
  tokens more. Every call of decoding writes them over those of the one before,
  so that none of them reads the prompts again.
  """
  import jax
  import numpy as np

  from moh_jax.config.llm import Sampling
  from moh_jax.inference import decoding, generate
  from moh_jax.models.llm import LLM

  config, length = run.model, run.data.sequence_length
  model = LLM(config, unrolled=True)
  params = generate.serving_params(random_params(run), config)
  read = decoding.make_prefill(model, generate.default_cache_dtype(config))
  write = decoding.make_decode(model, (), _SPAN)
  rows = generate.batch_bucket(texts, config)
  prompts = (
    np.ones((rows, length), np.int32),
    np.zeros(rows, np.int32),
    np.arange(rows, dtype=np.int32),
    np.zeros(rows, bool),
  )
  endless = Sampling(max_new_tokens=2**30)
  numbers = decoding.span_numbers(endless, _SPAN)

  slots = generate.length_bucket(length + _SPAN)

  def prefill() -> Any:
    return read(params, *prompts, slots)

  state = [jax.block_until_ready(prefill())]
  start = np.int32(state[0].slot)

  def decode() -> jax.Array:
    again = dataclasses.replace(state[0], slot=start)
    state[0], tokens, _ = write(params, again, numbers, True, False)
    return tokens

  if texts == 1:
    yield "prefill", prefill, length
  yield f"decode_{texts}", decode, texts * _SPAN


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions(command.RunConfig, command.Output):
  """Time a run's input beside its train step."""


@alive("measuring")
def run_input(options: InputOptions) -> int:
  """Prints examples per second of the input and of the step."""
  from moh_jax.data.infer import resolve
  from moh_jax.runtime.mesh import make_mesh
  from moh_jax.training.bench import seconds, step_of
  from moh_jax.training.task import task_builder

  config = resolve(options.loaded)
  task = task_builder(config).make_task(config)
  stream = task.batches(make_mesh(config.mesh))
  next(stream)  # starts threads
  reading = seconds(lambda: next(stream) and None, _BATCHES)
  stream.close()
  step = step_of(config)
  step()  # compiles
  stepping = seconds(step, _STEPS)
  size = config.data.batch_size
  rates = {"input": size / reading, "step": size / stepping}
  slower = min(rates, key=rates.get)
  values = {"config": config_lib.to_dict(config), "bottleneck": slower}
  lines = [f"{name}: {rate:,.0f} examples/s" for name, rate in rates.items()]
  options.give(
    values | {"examples_per_second": rates}, [*lines, f"bottleneck: {slower}"]
  )
  return 0


KINDS = {
  "model": (ModelOptions, run_model),
  "input": (InputOptions, run_input),
}
