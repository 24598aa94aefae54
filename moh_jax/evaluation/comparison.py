"""Results of runs that differ in variant and seed: spreads, a table, a plot."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.evaluation import pictures

_HIGHER = {"accuracy", "top5_accuracy", "precision", "recall"}  # is better
# Costs that the table shows over those of the first row, with their titles.
_COSTS = {"step_flops": "FLOPs needed", "step_seconds": "time of a step"}
_Key = tuple[str, str]  # a variant and its setting
# Metrics by seed; {} of a run that ended early.
Results = Mapping[_Key, Mapping[int, Mapping[str, float]]]


@dataclasses.dataclass(frozen=True)
class Spread:
  """Values of one quantity over seeds.

  Attributes:
    values: of each seed.
    mean: their mean; NaN for none.
    deviation: their sample standard deviation, 0 for less than two.
  """

  values: tuple[float, ...]
  mean: float
  deviation: float

  def text(self, form: str = ".4f") -> str:
    """Mean and deviation; one value has none to show."""
    if not self.values:
      return "-"
    more = f" ± {self.deviation:.4f}" if len(self.values) > 1 else ""
    return f"{self.mean:{form}}{more}"


@dataclasses.dataclass(frozen=True)
class Row:
  """A variant with a setting, over its seeds.

  Attributes:
    variant: its name.
    setting: override of the config; "" for none.
    runs: number of runs.
    failed: those that diverged: ended early, or have a metric that is not
      finite.
    best: whether no other setting of the variant diverged less often or, of
      those that diverged as often, is better in the first metric.
    metrics: by name, of the other runs.
    difference: first metric less that of the baseline with the same seed, for
      each seed that both have.
    better: seeds of these in which it beats the baseline.
    activated_share: heads used over heads present, as the evaluation counts.
    costs: "parameters", "step_flops" (that the active heads need) and, where
      measured, "step_seconds" and "step_spread", (75th - 25th percentile) /
      median of the ratio to the first row's.
  """

  variant: str
  setting: str
  runs: int
  failed: int
  best: bool
  metrics: Mapping[str, Spread]
  difference: Spread
  better: int
  activated_share: float
  costs: Mapping[str, float]


def choose_metrics(results: Results, asked: Sequence[str]) -> list[str]:
  """Names of the metrics to compare.

  Args:
    results: of every variant and setting.
    asked: by the user; empty for those that the runs have of accuracy, bits
      per byte and loss.

  Raises:
    ValueError: no run has one of them.
  """
  found = [set(x) for seeds in results.values() for x in seeds.values() if x]
  known = sorted(set.intersection(*found)) if found else []
  names = list(asked) or [name for name in pictures.SCORES if name in known]
  if wrong := [name for name in names if found and name not in known]:
    raise ValueError(f"metric {wrong[0]!r} must be one of {', '.join(known)}")
  return names or ["loss"]


def summarize(
  results: Results,
  metrics: Sequence[str],
  costs: Mapping[_Key, Mapping[str, float]],
) -> list[Row]:
  """Compares variants with the first one.

  Args:
    results: of every variant and setting.
    metrics: names; the first one decides which setting is best.
    costs: of each variant and setting, see `Row`.

  Returns:
    A row for each entry. The baseline of the differences is the best setting of
    the first variant.
  """
  decides = metrics[0]
  sign = 1 if decides in _HIGHER else -1

  def is_finite(one: Mapping[str, float]) -> bool:
    return bool(one) and all(math.isfinite(one[name]) for name in metrics)

  finite = {
    key: {seed: one for seed, one in seeds.items() if is_finite(one)}
    for key, seeds in results.items()
  }

  def rank(key: _Key) -> tuple[int, float]:
    seeds = finite[key].values()
    return len(seeds), sign * _spread([one[decides] for one in seeds]).mean

  best: dict[str, _Key] = {}
  for key in sorted(filter(finite.get, finite), key=rank, reverse=True):
    best.setdefault(key[0], key)
  baseline = finite.get(best.get(next(iter(results))[0]), {})
  rows = []
  for key, seeds in finite.items():
    differences = [
      one[decides] - baseline[seed][decides]
      for seed, one in seeds.items()
      if seed in baseline
    ]
    shares = [one["activated_share"] for one in seeds.values()]
    rows.append(
      Row(
        *key,
        runs=len(results[key]),
        failed=len(results[key]) - len(seeds),
        best=best.get(key[0]) == key,
        metrics={
          n: _spread([one[n] for one in seeds.values()]) for n in metrics
        },
        difference=_spread(differences),
        better=sum(sign * difference > 0 for difference in differences),
        activated_share=_spread(shares).mean,
        costs=costs[key],
      )
    )
  return rows


def _spread(values: Sequence[float]) -> Spread:
  mean = statistics.fmean(values) if values else float("nan")
  deviation = statistics.stdev(values) if len(values) > 1 else 0.0
  return Spread(tuple(values), mean, deviation)


def to_markdown(rows: Sequence[Row]) -> str:
  """The rows as a Markdown table, and what its numbers mean.

  Ratios are to the first row. The first metric names how many runs diverged, if
  any did.
  """
  costs = [n for n in _COSTS if all(n in row.costs for row in rows)]
  names = list(rows[0].metrics)
  swept = any(row.setting for row in rows)
  header = ["variant", *["setting"] * swept, *names]
  header += [f"{names[0]}, difference"]
  header += ["better in", "heads", "parameters", *map(_COSTS.get, costs)]
  lines = [header, ["---"] * len(header)]
  for row in rows:
    setting = row.setting.partition("=")[2]
    is_baseline = row.variant == rows[0].variant and row.best
    better = f"{row.better} of {len(row.difference.values)}"
    share = f"{row.activated_share:.1%}"
    shown = [spread.text() for spread in row.metrics.values()]
    if row.failed:
      shown[0] += f" ({row.failed} of {row.runs} diverged)"
    ratios = [f"{row.costs[n] / rows[0].costs[n]:.2f}" for n in costs]
    if (spread := row.costs.get("step_spread")) and row is not rows[0]:
      ratios[-1] += f" ± {float(ratios[-1]) * spread / 2:.2f}"
    lines.append(
      [
        row.variant,
        *[f"**{setting}**" if row.best and setting else setting] * swept,
        *shown,
        "" if is_baseline else row.difference.text("+.4f"),
        "" if is_baseline else better if row.difference.values else "-",
        share if row.failed < row.runs else "-",
        f"{row.costs['parameters']:,.0f}",
        *ratios,
      ]
    )
  widths = [max(map(len, column)) for column in zip(*lines)]
  lines[1] = ["-" * width for width in widths]
  table = "\n".join(
    f"| {' | '.join(map(str.ljust, cells, widths))} |" for cells in lines
  )
  better = "; ".join(f"{name}: {_better(name)} is better" for name in names)
  return (
    f"{table}\n\n{better}. Differences are to {rows[0].variant} with the same "
    "seed; ± is the standard deviation over seeds; of times, half of the "
    "interquartile range of the turns."
  )


def _better(metric: str) -> str:
  return "more" if metric in _HIGHER else "less"


def plot(rows: Sequence[Row]) -> Any:
  """The first metric over the activated share: every seed, mean and spread.

  Returns:
    A figure with the best setting of each variant.
  """
  name = next(iter(rows[0].metrics))
  figure = pictures.new_figure(figsize=(7, 4.5))
  axis = figure.subplots()
  shown = [row for row in rows if row.best]
  for row, color in zip(shown, pictures.head_colors(len(shown))):
    spread, share = row.metrics[name], row.activated_share
    places = [share] * len(spread.values)
    axis.plot(places, spread.values, "o", color=color, alpha=0.4)
    label = f"{row.variant} {row.setting}".rstrip()
    if row.failed:
      label += f" ({row.failed} of {row.runs} diverged)"
    line = {"color": color, "marker": "_", "markersize": 14, "capsize": 4}
    axis.errorbar(share, spread.mean, spread.deviation, label=label, **line)
  axis.set_xlabel("activated share of the heads")
  axis.set_ylabel(f"{name}, {_better(name)} is better (mean ± deviation)")
  axis.grid(alpha=0.3)
  figure.legend(loc="outside right upper", fontsize=8)
  return figure
