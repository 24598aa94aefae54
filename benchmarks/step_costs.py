"""What a training step of variants of a config costs, without training them.

  python -m benchmarks.step_costs --config configs/vit_digits.py \
    --variants mha,moh50 --json benchmarks/results/step_costs_vit_cpu.json

The last columns of `python -m moh_jax compare`, for docs/results.md.
"""

import sys

import jax

from benchmarks.common import finish, make_parser
from moh_jax.cli.flags import split_changes
from moh_jax.data.infer import resolve
from moh_jax.runtime.sharding import axis_sizes
from moh_jax.runtime.steps import load_config
from moh_jax.training.bench import step_seconds
from moh_jax.training.flops import form_summary, step_flops, step_forms
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
  times, rows = step_seconds(runs, args.rounds), []
  for name, run in runs.items():
    forms = step_forms(run, axis_sizes(run.mesh, jax.device_count()))
    flops, (form, share) = step_flops(run), form_summary(run, forms)
    rows.append(
      {
        "variant": name,
        "form": form,
        "computed_share": share,
        "flops_needed": flops.active,
        "flops_computed": sum(flops.computed(forms).values()),
        "seconds": times[name].median,
        "ratio_spread": times[name].spread,
      }
    )
  settings = {"config": args.config, "overrides": overrides, **vars(args)}
  finish(args, rows, settings=settings)


if __name__ == "__main__":
  main()
