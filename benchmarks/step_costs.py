"""How long a training step of variants of a config takes, without training.

  python -m benchmarks.step_costs --config configs/vit_digits.py \
    --variants mha,moh50 --json benchmarks/results/step_costs_vit_cpu.json

The last column of `python -m moh_jax compare`, for docs/results.md.
"""

import sys

from benchmarks.common import finish, make_parser
from moh_jax.cli.flags import split_changes
from moh_jax.data.infer import resolve
from moh_jax.runtime.steps import load_config
from moh_jax.training.bench import step_seconds
from moh_jax.training.variants import compared_runs


def main() -> None:
  """Measures and prints a table; ratios are to the first variant."""
  parser = make_parser(__doc__, rounds=15)
  parser.add_argument("--config", required=True, metavar="FILE")
  parser.add_argument("--variants", default="mha,config", metavar="NAME,...")
  argv, overrides = split_changes(sys.argv[1:])
  args = parser.parse_args(argv)
  config = load_config(args.config, overrides)
  variants = args.variants.split(",")
  runs = {
    one.variant: resolve(one.config)
    for one in compared_runs(config, variants, "", 1)
  }
  rows = [
    {"variant": name, "seconds": time.median, "ratio_spread": time.spread}
    for name, time in step_seconds(runs, args.rounds).items()
  ]
  settings = {"config": args.config, "overrides": overrides, **vars(args)}
  finish(args, rows, settings=settings)


if __name__ == "__main__":
  main()
