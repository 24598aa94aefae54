"""A model against its multi-head baseline: speed, compilation, memory.

Forward and forward + backward, jitted, random inputs. The baseline is the same
network with the router off; "router" is the forward time of all routers of the
model by themselves. A diffusion model is also sampled: the time of
`sampler_steps` steps over as many forward passes. A language model scores texts
(forward is its loss) and, for 1 and 8 texts, reads prompts and writes: the time
of one more token (`speed/writing.py`).
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import (
  Config,
  DataConfig,
  OptimConfig,
  SampleConfig,
  TextDataConfig,
  without_router,
)
from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.data.text.packing import FakeSequences
from moh_jax.models.generation import make_draw
from moh_jax.models.registry import get_model
from moh_jax.runtime import sharding
from moh_jax.speed import compare, model_programs, timing, writing
from moh_jax.speed.compare import Setting, Variant
from moh_jax.speed.options import check_at_least_1, check_names
from moh_jax.speed.programs import compile_program
from moh_jax.speed.report import Row
from moh_jax.training import optim
from moh_jax.training.state import make_state
from moh_jax.training.step import jit_train_step
from moh_jax.training.tasks import make_task

_DEFAULT_LENGTHS = (512,)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
  """Of a model.

  Attributes:
    model: a released name.
    lengths: tokens of a text; None is a default, and the only choice of models
      of images.
    implementations: of the attention, each of them a variant of the model.
    batch: images or texts.
    dtype: compute dtype.
    remat: instead of the model's; None keeps it.
    sampler_steps: of a diffusion model's sampler.
    compile_only: only compile the train step.
    rounds: measured turns.

  Raises:
    ValueError: an option is out of range; its text names it.
  """

  model: str = "moh-vit-s80"
  lengths: tuple[int, ...] | None = None
  implementations: tuple[str, ...] = ("auto",)
  batch: int = 4
  dtype: str = "float32"
  remat: str | None = None
  sampler_steps: int = 10
  compile_only: bool = False
  rounds: int = 7

  def __post_init__(self):
    model = self.network()
    for name in ("batch", "sampler_steps", "rounds"):
      check_at_least_1(name, [getattr(self, name)])
    check_names("implementations", self.implementations, IMPLEMENTATIONS)
    if self.lengths is None:
      return
    check_at_least_1("lengths", self.lengths)
    if model.family != "llm":
      raise ValueError(
        f"--lengths {','.join(map(str, self.lengths))} is for language models: "
        f"{self.model} reads images of one size"
      )
    if max(self.lengths) > model.max_length:
      raise ValueError(
        f"--lengths {max(self.lengths)} must be at most {model.max_length}, "
        f"the max_length of {self.model}"
      )

  def network(self) -> Any:
    """The model's section."""
    changes = {"dtype": self.dtype}
    if self.remat:
      changes["remat"] = self.remat
    return dataclasses.replace(get_model(self.model), **changes)

  def variants(self) -> dict[str, Any]:
    """Implementation -> model; "mha" is the baseline."""
    moh = self.network()
    models = {
      name: dataclasses.replace(moh, attention_impl=name)
      for name in self.implementations
    }
    return {**models, "mha": without_router(moh)}

  def runs(self) -> dict[int | None, Config]:
    """A run of random data around the model for every length."""
    model = self.network()
    lengths = (None,)
    if model.family == "llm":
      lengths = self.lengths or _DEFAULT_LENGTHS
    return {n: _run(model, self.batch, n) for n in lengths}


def measure(options: ModelOptions) -> dict[str, Any]:
  """Measures a model.

  Returns:
    "rows", a `Row` each; "train_step", figures of the longest run's; "sampler",
    of a diffusion model; "peak_resident_bytes" of the process.
  """
  runs = options.runs()
  longest = runs[max(runs, key=lambda length: length or 0)]
  result = {"train_step": _train_step(longest), "rows": []}
  if not options.compile_only:
    for length, run in runs.items():
      result["rows"] += _rows(options, run, length)
    if longest.model.family == "dit":
      result["sampler"] = _sampler(options, longest)
  result["peak_resident_bytes"] = timing.peak_resident_bytes()
  return result


def _run(model: Any, batch: int, length: int | None) -> Config:
  if model.family == "llm":
    text = TextDataConfig(sequence_length=length, batch_size=batch)
    return Config(model=model, data=text)
  ema = 0.9999 if model.family == "dit" else 0.0
  return Config(
    model=model,
    data=DataConfig(batch_size=batch),
    optim=OptimConfig(ema_decay=ema),
  )


def _rows(options: ModelOptions, run: Config, length: int | None) -> list[Row]:
  models = options.variants()
  shares = {name: model.activated_share for name, model in models.items()}
  programs = {
    name: model_programs.programs(dataclasses.replace(run, model=model))
    for name, model in models.items()
  }
  rows = []
  for mode in ("forward", "forward_backward"):
    variants = [
      Variant(name, shares[name], program[mode], name == "mha")
      for name, program in programs.items()
    ]
    if mode == "forward" and run.model.router.kind == "two_stage":
      routers = model_programs.routers(run)
      variants.append(Variant("router", run.model.activated_share, routers))
    setting = Setting(
      op="model",
      mode=mode,
      length=length,
      units=options.batch * (length or 1),
      rounds=options.rounds,
      least=0.0,
    )
    rows += compare.measure(setting, variants)
  if run.model.family == "llm":
    rows += writing.measure(models, shares, length, options.rounds)
  return rows


def _sampler(options: ModelOptions, run: Config) -> dict[str, float]:
  """Time of a guided sampler over that of its network evaluations."""
  sample = SampleConfig(
    method="ddpm", steps=str(options.sampler_steps), cfg_scale=1.5
  )
  run = dataclasses.replace(run, sample=sample)
  network, params, _ = model_programs.inputs(run, 1)
  _, _, inputs = model_programs.inputs(run, 2 * options.batch)  # guided: twice
  index = jnp.arange(options.batch, dtype=jnp.int32)

  def forward(params: Any, *inputs: Any) -> jax.Array:
    return network.apply({"params": params}, *inputs)[0]

  programs = {
    "sampler": compile_program(
      make_draw(network, run), params, 0, index, index
    ),
    "forward": compile_program(forward, params, *inputs),
  }
  times = timing.interleaved(
    {name: program.run for name, program in programs.items()}, options.rounds
  )
  steps = options.sampler_steps
  return {
    "steps": steps,
    "ms": times["sampler"].median * 1e3,
    "forward_ms": times["forward"].median * 1e3,
    "ratio_to_forwards": times["sampler"].median
    / (steps * times["forward"].median),
  }


def _train_step(run: Config) -> dict[str, float]:
  """Time to compile the whole optimizer step, and the bytes of its state."""
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  optimizer = optim.make_optimizer(run.optim, run.train.steps)
  task = make_task(run)
  _, state = make_state(
    task.model,
    task.inputs,
    optimizer,
    mesh,
    seed=0,
    keep_ema=run.optim.ema_decay > 0,
  )
  step = jit_train_step(
    loss_fn=task.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(run.optim, run.train.steps),
    ema_decay=run.optim.ema_decay,
  )
  abstract = _abstract_batch(run)
  start = time.perf_counter()
  compiled = step.lower(state, abstract).compile()
  seconds = time.perf_counter() - start
  return {
    "compile_seconds": seconds,
    "params_bytes": _bytes(state.params),
    "optimizer_bytes": _bytes(state.opt_state),
    "ema_bytes": _bytes(state.ema),
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
  }


def _abstract_batch(run: Config) -> dict[str, jax.ShapeDtypeStruct]:
  size = run.data.batch_size
  if run.model.family == "llm":
    example = FakeSequences(2, run.data.sequence_length, 1)[0]
  else:
    example = {
      "image": np.zeros(run.model.input_shape, np.float32),
      "label": np.int32(0),
    }
  return {
    name: jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
    for name, x in example.items()
  }


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
