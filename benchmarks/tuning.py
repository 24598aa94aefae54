"""Ways to continue-tune a multi-head language model into MoH.

  python train.py --config=configs/llm_stdlib.py:mha --workdir=runs/mha
  python -m benchmarks.tuning --checkpoint runs/mha --workdir runs/tuning \
    --seeds 3 --json benchmarks/results/tuning_cpu.json

The ways are: the first heads are shared, the most important heads are shared,
the number of active heads falls step by step, or the important heads are shared
and adapters are trained, without and with the model before the tuning as
teacher. The same number of steps without a router is the baseline. The table
has held-out bits per byte when the router is turned on, before any step, and
after tuning: mean and sample standard deviation over seeds.
"""

import pathlib
import statistics

from benchmarks.common import finish, make_parser
from moh_jax.cli import main as cli
from moh_jax.config import Config
from moh_jax.inference.restore import restore
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.steps import load_config
from moh_jax.training.language_modeling import make_evaluate
from moh_jax.training.train import train

_CONFIG = "configs/llm_stdlib.py"
_ADAPTERS = ("tune.lora.rank=64", "optim.lr=5e-3", "optim.final_lr=5e-4")


def main() -> None:
  """Tunes, evaluates and prints a table."""
  parser = make_parser(__doc__)
  parser.add_argument("--checkpoint", required=True, metavar="DIR")
  parser.add_argument("--workdir", required=True, metavar="DIR")
  parser.add_argument("--seeds", type=int, default=1)
  args = parser.parse_args()
  workdir = pathlib.Path(args.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  heads = workdir / "heads.json"
  cli.main(["heads", "--checkpoint", args.checkpoint, "--json", str(heads)])

  important = f"importance:{heads}"
  ways = {
    "mha": ("tune_mha", ()),
    "first": ("tune", ()),
    "importance": (important, ()),
    "schedule": ("schedule", ()),
    "adapters": (important, _ADAPTERS),
    "taught": (important, (*_ADAPTERS, "tune.distill.weight=1")),
  }
  rows, before = [], _bits(args.checkpoint)
  if args.json != "-":
    print(f"before: {before:.4f} bits per byte, all heads on")
  for name, (kind, changes) in ways.items():
    found = []
    for seed in range(1, args.seeds + 1):
      own = (f"train.init_from={args.checkpoint}", f"train.seed={seed}")
      config = load_config(f"{_CONFIG}:{kind}", [*own, *changes])
      found.append(train(config, str(workdir / f"{name}{seed}")).evaluation)
    tuned = [one["bits_per_byte"] for one in found]
    rows.append(
      {
        "kind": name,
        "activated_share": found[0]["activated_share"],
        "router_on": _bits(args.checkpoint, config),
        "tuned": statistics.mean(tuned),
        "spread": statistics.stdev(tuned) if len(tuned) > 1 else 0.0,
      }
    )
  finish(args, rows, before=before)


def _bits(directory: str, config: Config | None = None) -> float:
  """Held-out bits per byte of a checkpoint.

  Args:
    directory: working directory of the checkpoint.
    config: config whose router is used instead of the checkpoint's, or None.
  """
  mesh = make_mesh(load_config(f"{_CONFIG}:mha").mesh)
  overrides = {}
  if config is not None and config.model.router.kind != "none":
    names = ("router", "shared_heads", "top_k", "head_order")
    overrides = {name: getattr(config.model, name) for name in names}
    if config.tune.top_k_values:
      first = config.tune.top_k_values[0]
      overrides["top_k"] = (first,) * config.model.depth
  with use_mesh(mesh):
    restored = restore(directory, mesh=mesh, **overrides)
    evaluate = make_evaluate(restored.model, restored.config, restored)
    return evaluate(restored.params, mesh)["bits_per_byte"]


if __name__ == "__main__":
  main()
