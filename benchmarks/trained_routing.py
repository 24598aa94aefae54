"""Times attention with the routing of a trained model, beside a random one.

  python train.py --config=configs/llm_stdlib.py:moh50 --workdir=runs/routing \
    --config.data.sequence_length=512 --config.data.batch_size=4 \
    --config.train.steps=150 --config.optim.warmup_steps=40
  python -m benchmarks.trained_routing --checkpoint runs/routing \
    --json benchmarks/results/trained_routing_cpu.json

`bench attention` draws the heads of each token uniformly at random. A trained
router prefers some heads, so that the blocks of others are emptier. Queries,
keys and values are random in both.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import finish, make_parser
from moh_jax.cli import main as cli
from moh_jax.cli.bench_attention import random_active
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.ops.attention import attention
from moh_jax.runtime import checkpoint
from moh_jax.training.bench import compile_program, interleaved


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
  """The active heads [B, N, H] of held-out examples, for each layer."""
  with tempfile.TemporaryDirectory() as folder:
    status = cli.main(
      [
        *("heads", "--checkpoint", directory, "--out", folder),
        *("--maps", str(examples), "--batches", "1", "--batch-size", "8"),
      ]
    )
    if status:
      raise SystemExit(status)
    with np.load(pathlib.Path(folder) / "heads.npz") as arrays:
      selected = arrays["maps/selected"][:, :examples]
  shared = [np.arange(b.num_heads) < b.shared for b in budgets]
  return [jnp.asarray(a | b) for a, b in zip(selected, shared)]


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

  times = interleaved(
    {
      name: compile_program(layers, *qkv, active)
      for name, active in routings.items()
    },
    rounds,
    0.05,
  )
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
