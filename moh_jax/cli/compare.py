"""`python -m moh_jax compare`."""

from __future__ import annotations

import dataclasses
from typing import Any

from moh_jax.cli import command
from moh_jax.cli.train import read_decoder
from moh_jax.config import Config
from moh_jax.config.base import Count, Natural
from moh_jax.runtime import processes
from moh_jax.runtime.alive import alive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Workdir, command.Distributed, command.Output):
  """Train variants of a run over several seeds, and compare their scores.

  Attributes:
    workdir: directory of the runs' checkpoints and metrics; run again with the
      same arguments, the command resumes.
    variants: each is config, mha, gate (all heads, weighed by sigmoids), mhaNN
      or mhaNN-wide (NN % of the heads present) or mohNN (NN % active); config
      and mohNN also with -double (of twice the heads, with a narrower MLP),
      -onestage (the groups of heads weigh the same), -sharedNN (NN % of the
      active heads are shared), as in moh50-shared0, -first or -last (that half
      of the layers has more active heads, the other fewer), and -per_group or
      -whole_group (model.router.structure); differences are to the first one.
    seeds: runs of each variant, from train.seed on.
    sweep: train each variant with each value of a config field, such as
      optim.lr=1e-3,2e-3 or "model.top_k=(1,2),(1,3)"; the best one of each, and
      of these one of which no run diverged, stands for it.
    metrics: what to compare, the one that decides first; without it accuracy,
      bits_per_byte and loss, those that the evaluation has.
    rounds: turns in which the times of a step are measured, side by side; 0
      measures none.
    plot: draw the first metric over the activated share, as .png or .svg.
    vae: autoencoder weights that show samples of latent diffusion.
  """

  workdir: command.Place = "runs/compare"
  variants: tuple[str, ...] = ("mha", "config")
  seeds: Count = 3
  sweep: str = command.option(metavar="FIELD=VALUE,...", default="")
  metrics: tuple[str, ...] = ()
  rounds: Natural = 5
  plot: command.OutFile | None = None
  vae: command.Place | None = None

  KEEPS_PROGRAMS = True  # runs that differ in their seed are one program

  def check(self) -> None:
    """The plot is of a known form."""
    super().check()
    if self.plot and not self.plot.endswith((".png", ".svg")):
      self.fail("plot", "must end in .png or .svg")


def run(options: Options) -> int:
  """Trains the variants and prints the table that compares them.

  Returns:
    0, or the status after a request to stop.
  """
  from moh_jax.cli import run_log
  from moh_jax.data.infer import resolve
  from moh_jax.evaluation import comparison, pictures
  from moh_jax.training.bench import step_seconds
  from moh_jax.training.variants import compare, compared_runs

  runs = compared_runs(
    options.loaded, options.variants, options.sweep, options.seeds
  )
  options.join()
  runs = [dataclasses.replace(one, config=resolve(one.config)) for one in runs]
  decode = read_decoder(options.vae, runs[0].config)
  with run_log.kept(options):
    results = compare(runs, options.workdir, decode)
  if results is None:  # a run was stopped, and said so
    return processes.stop_status()
  configs = {(one.variant, one.setting): one.config for one in runs}
  seconds = {}
  if options.rounds:  # no learning rate changes the time of a step
    with alive("measuring the times of a step"):
      steps = {_step(one): one for one in configs.values()}
      seconds = step_seconds(steps, options.rounds)
  if not options.is_first():
    return 0
  costs = {
    key: _costs(one, seconds.get(_step(one))) for key, one in configs.items()
  }
  metrics = comparison.choose_metrics(results, options.metrics)
  rows = comparison.summarize(results, metrics, costs)
  lines = [comparison.to_markdown(rows)]
  if options.plot:
    pictures.write_plot(options.plot, comparison.plot(rows))
    lines.append(f"plot: {options.plot}")
  values = {"rows": [dataclasses.asdict(row) for row in rows]}
  options.give(values, lines)
  return 0


def _step(config: Config) -> str:
  """What the time of a step depends on, as text."""
  rates = {"lr": 0.0, "warmup_lr": 0.0, "final_lr": 0.0, "warmup_steps": 0}
  optim = dataclasses.replace(config.optim, **rates)
  own = config.mesh, config.tune, config.sections
  return repr((config.model, config.data, optim, *own))


def _costs(config: Config, time: Any) -> dict[str, float]:
  """Parameters, FLOPs and, with a `Timing`, seconds of a step."""
  import jax

  from moh_jax.models.registry import make_model
  from moh_jax.runtime.parameters import abstract_params
  from moh_jax.training.flops import step_flops

  params = jax.tree.leaves(abstract_params(*make_model(config)))
  costs = {
    "parameters": sum(leaf.size for leaf in params),
    "step_flops": step_flops(config),
  }
  if time is not None:
    costs |= {"step_seconds": time.median, "step_spread": time.spread}
  return costs
