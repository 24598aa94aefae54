"""MoH-ViT against its multi-head baseline: images/s, compilation, memory.

  python -m benchmarks.vit --json benchmarks/results/vit_cpu.json

Forward and forward + backward, float32, jitted, random images; the ratio is
the time of the MoH model over that of the baseline in the same run. `router` is
the forward time of all routers of the model by themselves. Memory is what XLA
allocates for the compiled program: arguments, outputs and temporaries.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from moh_jax.cli import common
from moh_jax.config import Config, DataConfig, ViTConfig, without_router
from moh_jax.layers.moh import HeadRouter
from moh_jax.models.registry import get_model
from moh_jax.models.vit import ViT
from moh_jax.training import optim, sharding
from moh_jax.training.state import init_params, make_state, unbox
from moh_jax.training.step import jit_train_step
from moh_jax.training.tasks import make_task


def main() -> None:
  """Measures and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="moh-vit-s80")
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--rounds", type=int, default=7)
  common.add_json(parser)
  args = parser.parse_args()
  moh = dataclasses.replace(get_model(args.model), drop_path=0.0)
  models = {"moh": moh, "mha": without_router(moh)}
  images = jax.random.normal(
    jax.random.key(0), (args.batch, *moh.image_size, moh.channels)
  )
  programs = {name: _programs(cfg, images) for name, cfg in models.items()}
  rows = []
  for mode in ("forward", "forward_backward"):
    calls = {name: p[mode] for name, p in programs.items()}
    if mode == "forward":
      calls["router"] = _routers(moh, args.batch)
    times = timing.interleaved(
      {name: call.run for name, call in calls.items()}, args.rounds
    )
    for name, call in calls.items():
      rows.append(
        {
          "model": args.model,
          "variant": name,
          "mode": mode,
          "batch": args.batch,
          "ms": times[name].median * 1e3,
          "spread": times[name].spread,
          "images_per_second": args.batch / times[name].median,
          "ratio_to_mha": times[name].median / times["mha"].median,
          "program_bytes": call.bytes,
          "compile_seconds": call.compile_seconds,
        }
      )
  step_seconds = _train_step_compile_seconds(moh, args.batch)
  result = {
    "machine": timing.machine(),
    "train_step_compile_seconds": step_seconds,
    "peak_resident_bytes": timing.peak_resident_bytes(),
    "rows": rows,
  }
  header = ("variant", "mode", "ms", "spread", "images/s", "to MHA", "MB")
  cells = [
    (
      row["variant"],
      row["mode"],
      f"{row['ms']:.1f}",
      f"{row['spread']:.0%}",
      f"{row['images_per_second']:.2f}",
      f"{row['ratio_to_mha']:.3f}",
      f"{row['program_bytes'] / 1e6:.0f}",
    )
    for row in rows
  ]
  print(common.table(cells, header))
  print(f"train step compiles in {step_seconds:.1f} s")
  common.write_json(args.json, result)


@dataclasses.dataclass(frozen=True)
class _Program:
  run: Callable[[], Any]
  bytes: int
  compile_seconds: float


def _compile(function: Callable, *args: Any) -> _Program:
  start = time.perf_counter()
  compiled = jax.jit(function).lower(*args).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  size = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
  )
  return _Program(lambda: compiled(*args), size, seconds)


def _programs(config: ViTConfig, images: jax.Array) -> dict[str, _Program]:
  model = ViT(config)
  init = jax.jit(lambda x: unbox(init_params(model, jax.random.key(1), (x,))))
  params = init(images[:1])

  def loss(params: Any, images: jax.Array) -> jax.Array:
    logits, aux = model.apply({"params": params}, images)
    return -jax.nn.log_softmax(logits)[:, 0].mean() + 0.01 * aux.balance_loss

  def forward(params: Any, images: jax.Array) -> jax.Array:
    return model.apply({"params": params}, images)[0]

  return {
    "forward": _compile(forward, params, images),
    "forward_backward": _compile(jax.grad(loss), params, images),
  }


def _routers(config: ViTConfig, batch: int) -> _Program:
  """The routers of every layer, on random tokens, and their use: the gates."""
  stages = zip(
    config.budgets(), config.depths, config.embed_dims, config.stage_shapes()
  )
  key = jax.random.key(2)
  layers, tokens = [], []
  for budget, depth, width, shape in stages:
    module = HeadRouter(budget, config.router_config)
    size = (batch, shape.grid[0] * shape.grid[1], width)
    x = jax.random.normal(key, size)
    heads = jnp.ones((*size[:2], budget.num_heads, budget.head_dim))
    params = unbox(module.init(key, x)["params"])
    layers.append((module, depth))
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


def _train_step_compile_seconds(config: ViTConfig, batch: int) -> float:
  """Time to compile the whole jitted optimizer step."""
  run = Config(model=config, data=DataConfig(batch_size=batch))
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  optimizer = optim.make_optimizer(run.optim, run.train.steps)
  task = make_task(run)
  _, state = make_state(
    task.model, task.inputs, optimizer, mesh, seed=0, keep_ema=False
  )
  step = jit_train_step(
    loss_fn=task.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(run.optim, run.train.steps),
  )
  shape = (batch, *config.image_size, config.channels)
  abstract = {
    "image": jax.ShapeDtypeStruct(shape, jnp.float32),
    "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
  }
  start = time.perf_counter()
  step.lower(state, abstract).compile()
  return time.perf_counter() - start


if __name__ == "__main__":
  main()
