"""A DiT's forward and backward pass against its matrix products alone.

  python -m benchmarks.products --model moh-dit-s2-90 --layers 2

The products are those of all heads, with the same shapes, in a program of their
own. Both run in turn. On a machine with other work look at the CPU time.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiTConfig, released_model
from moh_jax.models.dit import DiT
from moh_jax.runtime.params import abstract_params, unbox


def model_step(config: DiTConfig, batch: int):
  """The compiled gradient of a loss, as a function without arguments."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(batch, *config.input_shape)), jnp.float32)
  inputs = x, 100.0 * jnp.arange(batch), jnp.arange(batch)
  model = DiT(config)
  params = jax.tree.map(
    lambda p: jnp.asarray(rng.normal(0, 0.02, p.shape), p.dtype),
    unbox(abstract_params(model, inputs)),
  )

  def loss(params):
    out, aux = model.apply({"params": params}, *inputs)
    return jnp.mean(out**2) + 0.01 * aux.balance_loss

  step = jax.jit(jax.grad(loss)).lower(params).compile()
  return lambda: step(params)


def products(config: DiTConfig, batch: int):
  """The same layers' products and their gradients, and their FLOPs."""
  tokens, width, dim = config.num_tokens, config.width, config.head_dim
  rng, rows = np.random.default_rng(0), batch * tokens
  weights, flops = [], 0
  for heads in config.num_heads:
    inner = heads * dim
    shapes = ((width, 3 * inner), (inner, width))
    shapes += ((width, config.mlp_dim), (config.mlp_dim, width))
    weights.append(
      [jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32) for shape in shapes]
    )
    flops += 6 * rows * (sum(map(np.prod, shapes)) + 2 * tokens * inner)

  def chain(weights, x):
    for heads, (qkv, out, up, down) in zip(config.num_heads, weights):
      shape = batch * heads, tokens, dim
      q, k, v = (y.reshape(shape) for y in jnp.split(x @ qkv, 3, axis=1))
      mixed = jnp.einsum("bnd,bmd->bnm", q, k) @ v
      x = mixed.reshape(rows, -1) @ out @ up @ down
    return x.sum()

  x = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
  step = jax.jit(jax.grad(chain, (0, 1))).lower(weights, x).compile()
  return lambda: step(weights, x), flops


def main() -> None:
  """Prints GFLOP/s of both, and the ratio of their times."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--model", default="moh-dit-s2-90")
  parser.add_argument("--layers", type=int, help="default: all")
  parser.add_argument("--batch", type=int, default=8)
  parser.add_argument("--rounds", type=int, default=12)
  args = parser.parse_args()
  config = released_model(args.model)
  names = "num_heads", "shared_heads", "top_k"
  cut = {name: getattr(config, name)[: args.layers] for name in names}
  config = dataclasses.replace(config, **cut)
  alone, flops = products(config, args.batch)
  steps = {"model": model_step(config, args.batch), "products": alone}
  clocks = {"wall": time.perf_counter, "CPU": time.process_time}
  times = {key: [] for name in steps for key in ((name, c) for c in clocks)}
  for number in range(args.rounds + 1):
    for name, step in steps.items():
      before = {clock: read() for clock, read in clocks.items()}
      jax.block_until_ready(step())
      for clock, read in clocks.items():
        if number:  # the first warms up
          times[name, clock].append(read() - before[clock])
  for clock in clocks:
    for how in (np.min, np.median):
      model, alone = (how(times[name, clock]) for name in steps)
      print(
        f"{clock} time, {how.__name__}: model {flops / model / 1e9:.0f}, "
        f"products {flops / alone / 1e9:.0f} GFLOP/s, ratio {alone / model:.3f}"
      )


if __name__ == "__main__":
  main()
