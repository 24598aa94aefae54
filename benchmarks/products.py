"""Compares a DiT's training step with its matrix products alone.

  python -m benchmarks.products --model moh-dit-s2-90 --layers 2

The products are those of all heads, forward and backward, of all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import finish, make_parser
from moh_jax.cli.bench_model import random_params
from moh_jax.config import Config, DiTConfig, released_model
from moh_jax.models.dit import DiT
from moh_jax.training import timing


def model_step(config: DiTConfig, batch: int):
  """Gradients of a loss of the network on a random batch."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(batch, *config.input_shape)), jnp.float32)
  number = jnp.zeros(batch, jnp.int32)
  params = random_params(Config(config))

  def loss(params):
    out, aux = DiT(config).apply({"params": params}, x, number, number)
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
    weights.append([jnp.float32(rng.normal(0, 0.02, s)) for s in shapes])
    flops += 6 * rows * (sum(map(np.prod, shapes)) + 2 * tokens * inner)

  def chain(weights, x):
    for heads, (qkv, out, up, down) in zip(config.num_heads, weights):
      shape = batch * heads, tokens, dim
      q, k, v = (y.reshape(shape) for y in jnp.split(x @ qkv, 3, axis=1))
      mixed = jnp.einsum("bnd,bmd->bnm", q, k) @ v
      x = mixed.reshape(rows, -1) @ out @ up @ down
    return x.sum()

  x = jnp.float32(rng.normal(size=(rows, width)))
  step = jax.jit(jax.grad(chain, (0, 1))).lower(weights, x).compile()
  return lambda: step(weights, x), flops


def main() -> None:
  """Prints GFLOP/s of both, and the ratio of their times."""
  parser = make_parser(__doc__, rounds=12)
  parser.add_argument("--model", default="moh-dit-s2-90")
  parser.add_argument("--layers", type=int, help="default: all")
  parser.add_argument("--batch", type=int, default=8, help="examples")
  args = parser.parse_args()
  config = released_model(args.model)
  names = "num_heads", "shared_heads", "top_k"
  cut = {name: getattr(config, name)[: args.layers] for name in names}
  config = dataclasses.replace(config, **cut)
  alone, flops = products(config, args.batch)
  calls = {"model": model_step(config, args.batch), "products": alone}
  times = timing.interleaved(calls, args.rounds)
  rows = [
    {
      "what": name,
      "GFLOP/s": flops / time.median / 1e9,
      "of the products'": times["products"].over(time).median,
    }
    for name, time in times.items()
  ]
  finish(args, rows)


if __name__ == "__main__":
  main()
