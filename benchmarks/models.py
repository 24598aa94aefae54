"""A model against its multi-head baseline: speed, compilation, memory.

  python -m benchmarks.models --model moh-vit-s80 --batch 4 \
    --json benchmarks/results/vit_cpu.json
  python -m benchmarks.models --model moh-dit-s2-90 --batch 8 \
    --json benchmarks/results/dit_cpu.json
  python -m benchmarks.models --model moh-llm-s-75 --batch 2 --length 512 \
    --json benchmarks/results/llm_cpu.json

Forward and forward + backward, jitted, random inputs; the ratio is the time of
the MoH model over that of the same network with the router off, in the same
run. `router` is the forward time of all routers of the model by themselves.
Memory is what XLA allocates for the compiled program: arguments, outputs and
temporaries. A diffusion model is also sampled: the time of `--sampler-steps`
steps over as many forward passes. A language model scores `--length` tokens of
each text (forward is its loss) and, for 1 and 8 texts, reads prompts of that
length and writes: the time of one more token (`benchmarks/writing.py`).
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing, writing
from moh_jax.cli import common
from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  OptimConfig,
  SampleConfig,
  TextDataConfig,
  TuneConfig,
  without_router,
)
from moh_jax.data.packing import FakeSequences
from moh_jax.layers.moh import HeadRouter
from moh_jax.models.build import make_model
from moh_jax.models.generation import make_draw
from moh_jax.models.llm import LLM
from moh_jax.models.registry import get_model
from moh_jax.training import optim, sharding
from moh_jax.training.language_modeling import make_loss
from moh_jax.training.state import init_params, make_state, unbox
from moh_jax.training.step import jit_train_step
from moh_jax.training.tasks import make_task


def main() -> None:
  """Measures and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="moh-vit-s80")
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--remat", help="instead of the model's")
  parser.add_argument("--sampler-steps", type=int, default=10)
  parser.add_argument(
    "--length", type=int, default=512, help="tokens of a text"
  )
  parser.add_argument(
    "--compile-only", action="store_true", help="only the train step"
  )
  common.add_json(parser)
  args = parser.parse_args()
  changes = {"dtype": args.dtype}
  if args.remat:
    changes["remat"] = args.remat
  moh = dataclasses.replace(get_model(args.model), **changes)
  result = {
    "machine": timing.machine(),
    "model": args.model,
    "dtype": args.dtype,
    "remat": moh.remat,
    "batch": args.batch,
    "train_step": _train_step(_run(moh, args)),
  }
  if moh.family == "llm":
    result["length"] = args.length
  if not args.compile_only:
    result["rows"] = _rows(moh, args)
    if moh.family == "dit":
      result["sampler"] = _sampler(moh, args)
    if moh.family == "llm":
      result["rows"] += writing.rows(moh, args.length, args.rounds)
  result["peak_resident_bytes"] = timing.peak_resident_bytes()
  _print(result)
  common.write_json(args.json, result)


def _print(result: dict) -> None:
  header = ("variant", "mode", "ms", "spread", "units/s", "to MHA", "MB")
  cells = [
    (
      row["variant"],
      row["mode"],
      f"{row['ms']:.1f}",
      f"{row['spread']:.0%}",
      f"{row['units_per_second']:.2f}",
      f"{row['ratio_to_mha']:.3f}",
      f"{row['program_bytes'] / 1e6:.0f}" if "program_bytes" in row else "",
    )
    for row in result.get("rows", ())
  ]
  if cells:
    print(common.table(cells, header))
  for part in ("train_step", "sampler"):
    for name, value in result.get(part, {}).items():
      print(f"{part} {name}: {value:,.3f}".rstrip("0").rstrip("."))


def _run(model: Any, args: argparse.Namespace, batch: int = 0) -> Config:
  """A run of random data around a model."""
  batch = batch or args.batch
  if model.family == "llm":
    text = TextDataConfig(sequence_length=args.length, batch_size=batch)
    return Config(model=model, data=text, tune=TuneConfig())
  halves = (0.5,) * model.channels
  data = DataConfig(batch_size=batch, mean=halves, std=halves)
  ema = 0.9999 if model.family == "dit" else 0.0
  sections = {"data": data, "optim": OptimConfig(ema_decay=ema)}
  if model.family == "dit":
    sections |= {"diffusion": DiffusionConfig(), "sample": SampleConfig()}
  return Config(model=model, **sections)


@dataclasses.dataclass(frozen=True)
class _Program:
  run: Callable[[], Any]
  bytes: int


def _compile(function: Callable, *args: Any) -> _Program:
  compiled = jax.jit(function).lower(*args).compile()
  memory = compiled.memory_analysis()
  size = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
  )
  return _Program(lambda: compiled(*args), size)


def _rows(moh: Any, args: argparse.Namespace) -> list[dict]:
  models = {"moh": moh, "mha": without_router(moh)}
  programs = {n: _programs(_run(m, args)) for n, m in models.items()}
  units = args.batch * (args.length if moh.family == "llm" else 1)
  rows = []
  for mode in ("forward", "forward_backward"):
    calls = {name: p[mode] for name, p in programs.items()}
    if mode == "forward":
      if moh.router == "two_stage":
        calls["router"] = _routers(moh, args)
    times = timing.interleaved(
      {name: call.run for name, call in calls.items()}, args.rounds
    )
    rows += [
      {
        "variant": name,
        "mode": mode,
        "ms": times[name].median * 1e3,
        "spread": times[name].spread,
        "units_per_second": units / times[name].median,
        "ratio_to_mha": times[name].median / times["mha"].median,
        "program_bytes": call.bytes,
      }
      for name, call in calls.items()
    ]
  return rows


def _inputs(run: Config, batch: int) -> tuple[Any, Any, list]:
  """The network, random parameters and random inputs."""
  model, abstract = make_model(run)
  shapes = [(batch, *x.shape[1:]) for x in abstract]
  inputs = [
    jax.random.normal(jax.random.key(0), shape)
    if x.dtype == jnp.float32
    else jnp.arange(batch, dtype=x.dtype)
    for x, shape in zip(abstract, shapes)
  ]
  init = jax.jit(
    lambda xs: unbox(init_params(model, jax.random.key(1), xs)),
    compiler_options={"xla_backend_optimization_level": 0}
    if jax.devices()[0].platform == "cpu"
    else None,
  )
  params = init([x[:1] for x in inputs])
  # Zeros (of adaLN-Zero) would let a backward pass of nothing look fast.
  params = jax.tree.map(lambda x: x + 0.02, params)
  return model, params, inputs


def _programs(run: Config) -> dict[str, _Program]:
  if run.model.family == "llm":
    return _text_programs(run)
  model, params, inputs = _inputs(_without_drop_path(run), run.data.batch_size)

  def loss(params: Any, *inputs: Any) -> jax.Array:
    out, aux = model.apply({"params": params}, *inputs)
    return jnp.square(out).mean() + 0.01 * aux.balance_loss

  def forward(params: Any, *inputs: Any) -> jax.Array:
    return model.apply({"params": params}, *inputs)[0]

  return {
    "forward": _compile(forward, params, *inputs),
    "forward_backward": _compile(jax.grad(loss), params, *inputs),
  }


def _text_programs(run: Config) -> dict[str, _Program]:
  """The loss of packed text, and its gradients."""
  params = writing.random_params(run.model)
  loss_fn = make_loss(LLM(run.model), run)
  source = FakeSequences(
    run.model.vocab_size, run.data.sequence_length, run.data.batch_size
  )
  examples = [source[i] for i in range(run.data.batch_size)]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *examples)
  inputs = (params, batch, jax.random.key(0), jnp.int32(0))

  def forward(*inputs: Any) -> jax.Array:
    return loss_fn(*inputs)[0]

  return {
    "forward": _compile(forward, *inputs),
    "forward_backward": _compile(jax.grad(forward), *inputs),
  }


def _without_drop_path(run: Config) -> Config:
  if run.model.family != "vit":
    return run
  model = dataclasses.replace(run.model, drop_path=0.0)
  return dataclasses.replace(run, model=model)


def _routers(model: Any, args: argparse.Namespace) -> _Program:
  """The routers of every layer, on random tokens, and their use: the gates."""
  key = jax.random.key(2)
  layers, tokens = [], []
  for group in model.layer_groups():
    budget = group.budget
    module = HeadRouter(budget, model.router_config)
    tokens_ = args.length if model.family == "llm" else group.tokens
    x = jax.random.normal(key, (args.batch, tokens_, group.width))
    heads = jnp.ones((args.batch, tokens_, budget.num_heads, budget.head_dim))
    params = unbox(module.init(key, x)["params"])
    layers.append((module, group.depth))
    tokens.append((params, x, heads))

  def run(inputs: list) -> list[jax.Array]:
    outputs = []
    for (module, depth), (params, x, heads) in zip(layers, inputs):

      def one(heads, _, module=module, params=params, x=x):
        # The carry makes each pass depend on the last: none is merged.
        gates, aux = module.apply({"params": params}, x + heads[0, 0, 0, 0])
        return heads * gates[..., None], aux.balance_loss

      outputs.append(jax.lax.scan(one, heads, length=depth))
    return outputs

  return _compile(run, tokens)


def _sampler(model: Any, args: argparse.Namespace) -> dict[str, float]:
  """Time of a guided sampler over that of its network evaluations."""
  run = _run(model, args)
  options = SampleConfig(
    method="ddpm", steps=str(args.sampler_steps), cfg_scale=1.5
  )
  run = dataclasses.replace(run, sample=options)
  network, params, _ = _inputs(run, 1)
  _, _, inputs = _inputs(run, 2 * args.batch)  # guidance evaluates twice
  index = jnp.arange(args.batch, dtype=jnp.int32)
  sampler = _compile(make_draw(network, run), params, 0, index, index)

  def forward(params: Any, *inputs: Any) -> jax.Array:
    return network.apply({"params": params}, *inputs)[0]

  calls = {
    "sampler": sampler.run,
    "forward": _compile(forward, params, *inputs).run,
  }
  times = timing.interleaved(calls, args.rounds)
  steps = args.sampler_steps
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


if __name__ == "__main__":
  main()
