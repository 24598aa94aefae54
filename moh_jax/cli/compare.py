"""`python -m moh_jax compare`."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

import jax

from moh_jax.cli import common, distributed, run_log
from moh_jax.cli.train import read_decoder
from moh_jax.config import Config
from moh_jax.data.infer import resolve
from moh_jax.evaluation import comparison, pictures
from moh_jax.models.registry import make_model
from moh_jax.runtime.files import write_whole
from moh_jax.runtime.sharding import abstract_params, axis_sizes
from moh_jax.training import timing
from moh_jax.training.comparison import Comparison, Outcome
from moh_jax.training.flops import step_flops, step_forms
from moh_jax.training.timing import Timing, step_seconds
from moh_jax.training.variants import ComparedRun, compared_runs

_Row = tuple[str, str]  # variant and setting


def run(args: argparse.Namespace) -> int:
  """Trains the variants and prints the table that compares them.

  Returns:
    0, also after a request to stop.
  """
  runs = compared_runs(args.config, args.variants, args.sweep, args.seeds)
  if args.rounds < 0:
    raise ValueError(f"--rounds {args.rounds} must be at least 0")
  if args.plot:
    pictures.check_plot(args.plot)
  is_first = distributed.join(args)
  runs = [dataclasses.replace(one, config=resolve(one.config)) for one in runs]
  decode = read_decoder(args.vae, runs[0].config)
  with run_log.kept(args.workdir, is_first, args.distributed):
    compared = Comparison(args.config, args.workdir)
    finished = compared.run(runs, decode, args.verify)
  configs = {(one.variant, one.setting): one.config for one in runs}
  seconds = {}
  if finished and args.rounds:
    programs = {_step(one): one for one in configs.values()}
    seconds = step_seconds(programs, args.rounds)
  if not is_first:
    return 0
  if not finished:
    print("stopped; run the command again to go on", file=sys.stderr)
    return 0
  outcomes = compared.outcomes
  for one in runs:
    if fault := outcomes[one.name].fault:
      print(f"warning: {one.name}: {fault}", file=sys.stderr)
  results = _by_row(runs, outcomes)
  metrics = args.metrics or ["loss"]
  if any(results.values()):
    metrics = comparison.choose_metrics(list(results.values()), args.metrics)
  for one in runs:
    for name in metrics:
      if outcomes[one.name].metrics.get(name, 0) is None:
        print(f"warning: {one.name}: {name} is not finite", file=sys.stderr)
  costs = {
    key: _costs(one, seconds.get(_step(one))) for key, one in configs.items()
  }
  rows = comparison.summarize(results, args.seeds, metrics, costs)
  if args.json != "-":
    print(comparison.to_markdown(rows))
  if args.plot:
    form = pathlib.PurePath(args.plot).suffix[1:]
    content = pictures.encode(comparison.plot(rows), form)
    write_whole(pathlib.Path(args.plot), content)
  found = [dataclasses.asdict(row) for row in rows]
  common.write_json(args.json, {"machine": timing.machine(), "rows": found})
  return 0


def _by_row(
  runs: Sequence[ComparedRun], outcomes: Mapping[str, Outcome]
) -> dict[_Row, dict[int, dict[str, float]]]:
  """Metrics of the runs that got to their end, by row and seed."""
  results: dict[_Row, dict[int, dict[str, float]]] = {}
  for one in runs:
    seeds = results.setdefault((one.variant, one.setting), {})
    outcome = outcomes[one.name]
    if not outcome.fault:
      seeds[one.seed] = outcome.metrics
  return results


def _step(config: Config) -> str:
  """What the time of a step depends on, as text; no learning rate does."""
  rates = {"lr": 0.0, "warmup_lr": 0.0, "final_lr": 0.0, "warmup_steps": 0}
  optim = dataclasses.replace(config.optim, **rates)
  sections = config.model, config.data, optim, config.mesh, config.sections
  return repr((sections, config.train.balance_weight))


def _costs(config: Config, time: Timing | None) -> dict[str, float]:
  """Parameters, FLOPs and, where measured, seconds of a step."""
  params = jax.tree.leaves(abstract_params(*make_model(config)))
  sizes = axis_sizes(config.mesh, jax.device_count())
  flops = step_flops(config)
  costs = {
    "parameters": sum(leaf.size for leaf in params),
    "step_flops": flops.active,
    "computed_flops": sum(flops.computed(step_forms(config, sizes)).values()),
  }
  if time is not None:
    costs |= {"step_seconds": time.median, "step_spread": time.spread}
  return costs
