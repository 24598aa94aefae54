"""Times attention with the routing of a trained model, beside a random one.

  python train.py --config=configs/llm_stdlib.py:moh50 --workdir=runs/routing \
    --config.data.sequence_length=512 --config.data.batch_size=4 \
    --config.train.steps=150 --config.optim.warmup_steps=40
  python -m benchmarks.trained_routing --checkpoint runs/routing \
    --json benchmarks/results/trained_routing_cpu.json

`benchmarks.attention` draws the heads of each token uniformly at random. A
trained router prefers some heads, so that the blocks of others are emptier.
Queries, keys and values are random in both.
"""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.attention import random_active
from benchmarks.common import finish, make_parser
from benchmarks.rows import compile_program
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.data.sequences import Text
from moh_jax.evaluation.probe import make_probe, recorded_layers
from moh_jax.inference.restore import restore
from moh_jax.ops.attention import attention
from moh_jax.runtime import checkpoint
from moh_jax.training.bench import interleaved


def main() -> None:
  """Measures and prints a table."""
  parser = make_parser(__doc__, rounds=25)
  parser.add_argument("--checkpoint", required=True, metavar="DIR")
  parser.add_argument("--examples", type=int, default=1, help="of the batch")
  args = parser.parse_args()
  budgets = checkpoint.read_metadata(args.checkpoint)[0].config.model.budgets()
  masks = trained_masks(args.checkpoint, budgets, args.examples)
  rows = measure(masks, budgets, args.rounds)
  settings = {
    "tokens": masks[0].shape[1],
    "batch": args.examples,
    "heads": budgets[0].num_heads,
    "head_dim": budgets[0].head_dim,
    "share": budgets[0].share,
    "layers": len(budgets),
    "rounds": args.rounds,
  }
  finish(args, rows, settings=settings)


def trained_masks(
  directory: str, budgets: tuple[HeadBudget, ...], examples: int
) -> list[jax.Array]:
  """The active heads [B, N, H] of training text, for each layer."""
  restored = restore(directory)
  probe = make_probe(restored.model, restored.config)
  data = dataclasses.replace(restored.config.data, batch_size=examples)
  text = Text(data, restored.config.model.vocab_size, "train")
  batch = next(text.stream(0))
  _, recorded = probe.apply(restored.params, batch, mutable=["intermediates"])
  found = recorded_layers(recorded["intermediates"], "routing", 3)
  return [
    jnp.pad(x.selected, [(0, 0)] * 2 + [(b.shared, 0)], constant_values=True)
    for x, b in zip(found, budgets)
  ]


def measure(
  masks: list[jax.Array], budgets: tuple[HeadBudget, ...], rounds: int
) -> list[dict]:
  """Times causal attention of all layers, with every head and two routings."""
  batch, tokens, heads = masks[0].shape
  shape = (len(masks), batch, tokens, heads, budgets[0].head_dim)
  keys = jax.random.split(jax.random.key(0), 3)
  qkv = [jax.random.normal(key, shape) for key in keys]
  routings = {
    "every head": [None] * len(masks),
    "uniformly random": [
      random_active(Units(b), batch, tokens).mask for b in budgets
    ],
    "trained": masks,
  }

  def layers(q, k, v, active):
    return [
      attention(*arrays, active=one, max_active=b.active, causal=True)
      for *arrays, one, b in zip(q, k, v, active, budgets)
    ]

  programs = {
    name: compile_program(layers, *qkv, active)
    for name, active in routings.items()
  }
  times = interleaved({n: one.run for n, one in programs.items()}, rounds, 0.05)
  base = times["every head"]
  return [
    {
      "routing": name,
      "ms": time.median * 1e3,
      "ratio": time.over(base).median,
      "spread": time.over(base).spread,
    }
    for name, time in times.items()
  ]


if __name__ == "__main__":
  main()
