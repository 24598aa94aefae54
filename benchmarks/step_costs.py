"""What a training step of variants of a config costs, without training them.

  python -m benchmarks.step_costs --config configs/vit_digits.py \
    --variants mha,moh50 --json benchmarks/results/step_costs_vit_cpu.json

The last columns of `python -m moh_jax compare`, for docs/results.md.
"""

import argparse
import sys

import jax

from moh_jax.cli import common
from moh_jax.cli.overrides import split_overrides
from moh_jax.data.infer import resolve
from moh_jax.runtime.sharding import axis_sizes
from moh_jax.speed import timing
from moh_jax.speed.model_flops import step_flops
from moh_jax.speed.model_forms import step_forms, summary
from moh_jax.speed.steps import step_seconds
from moh_jax.training.variants import compared_runs


def main() -> None:
  """Measures and prints a table; ratios are to the first variant."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--config", required=True, metavar="FILE")
  parser.add_argument("--variants", default="mha,config", metavar="NAME,...")
  parser.add_argument("--rounds", type=int, default=15)
  common.add_json(parser)
  argv, overrides = split_overrides(sys.argv[1:])
  args = parser.parse_args(argv)
  config = common.load_config(args.config, overrides)
  variants = args.variants.split(",")
  runs = {
    one.variant: resolve(one.config)
    for one in compared_runs(config, variants, "", 1)
  }
  times, rows = step_seconds(runs, args.rounds), []
  for name, run in runs.items():
    forms = step_forms(run, axis_sizes(run.mesh, jax.device_count()))
    flops, (form, share) = step_flops(run), summary(run, forms)
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
  first, cells = rows[0], []
  for row in rows:
    ratios = [
      f"{row[key] / first[key]:.2f}"
      for key in ("flops_needed", "flops_computed", "seconds")
    ]
    cells.append((row["variant"], row["form"], *ratios))
  print(
    common.table(cells, ("variant", "attention", "needed", "computed", "time"))
  )
  settings = {"config": args.config, "overrides": overrides, **vars(args)}
  result = {"machine": timing.machine(), "settings": settings, "rows": rows}
  common.write_json(args.json, result)


if __name__ == "__main__":
  main()
