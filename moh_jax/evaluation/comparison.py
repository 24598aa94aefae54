"""Results of runs that differ in variant and seed: spreads, a table, a plot."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.evaluation import pictures

_HIGHER = {"accuracy", "top5_accuracy", "precision", "recall"}  # is better
# Costs that the table shows over those of the first row, with their titles.
_COSTS = {
  "step_flops": "FLOPs needed",
  "computed_flops": "FLOPs computed",
  "step_seconds": "time of a step",
}
# Metrics by run, for each seed that got to its end; None is not finite.
Results = Mapping[int, Mapping[str, float | None]]


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

  def __str__(self) -> str:
    return self.text(".4f")

  def text(self, form: str) -> str:
    """Mean and deviation; one value has none to show."""
    text = f"{self.mean:{form}}"
    more = len(self.values) > 1
    return f"{text} ± {self.deviation:.4f}" if more else text


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
    costs: "parameters", "step_flops" (that the active heads need),
      "computed_flops" and, where measured, "step_seconds" and "step_spread",
      (75th - 25th percentile) / median of the ratio to the first row's.
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


def choose_metrics(
  results: Sequence[Results], asked: Sequence[str]
) -> list[str]:
  """Names of the metrics to compare.

  Args:
    results: of every variant and setting.
    asked: by the user; empty for those that the runs have of accuracy, bits
      per byte and loss.

  Raises:
    ValueError: no run has one of them.
  """
  found = [set(one) for seeds in results for one in seeds.values()]
  known = sorted(set.intersection(*found)) if found else []
  names = list(asked) or [name for name in pictures.SCORES if name in known]
  for name in names or ["accuracy"]:
    if name not in known:
      raise ValueError(
        f"metric {name!r} must be one that every run has: "
        f"{', '.join(known) or 'there is none'}"
      )
  return names


def summarize(
  results: Mapping[tuple[str, str], Results],
  runs: int,
  metrics: Sequence[str],
  costs: Mapping[tuple[str, str], Mapping[str, float]],
) -> list[Row]:
  """Compares variants with the first one.

  Args:
    results: by variant and setting; seeds whose run ended early are absent,
      and those with metrics that are not finite count with them.
    runs: number of seeds.
    metrics: names, the one that decides first.
    costs: of each variant and setting, see `Row`.

  Returns:
    A row for each entry. The baseline of the differences is the best setting of
    the first variant.
  """
  decides = metrics[0]
  sign = 1 if decides in _HIGHER else -1

  def is_finite(one: Mapping[str, float | None]) -> bool:
    values = [one[name] for name in metrics]
    return None not in values and all(map(math.isfinite, values))

  results = {
    key: {seed: one for seed, one in seeds.items() if is_finite(one)}
    for key, seeds in results.items()
  }
  spreads = {
    key: {n: _spread([one[n] for one in seeds.values()]) for n in metrics}
    for key, seeds in results.items()
  }
  ranked = sorted(
    (key for key, seeds in results.items() if seeds),
    key=lambda key: (len(results[key]), sign * spreads[key][decides].mean),
    reverse=True,
  )
  best: dict[str, tuple[str, str]] = {}
  for key in ranked:
    best.setdefault(key[0], key)
  baseline = results.get(best.get(next(iter(results))[0]), {})
  rows = []
  for key, seeds in results.items():
    differences = [
      one[decides] - baseline[seed][decides]
      for seed, one in seeds.items()
      if seed in baseline
    ]
    shares = [one["activated_share"] for one in seeds.values()]
    rows.append(
      Row(
        *key,
        runs=runs,
        failed=runs - len(seeds),
        best=best.get(key[0]) == key,
        metrics=spreads[key],
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
  """The rows as a Markdown table; ratios are to the first row.

  Where runs diverged, a column has their number.
  """
  swept = any(row.setting for row in rows)
  costs = [n for n in _COSTS if all(n in row.costs for row in rows)]
  names = list(rows[0].metrics)
  header = ["variant", *["setting"] * swept, *names]
  header += [f"{names[0]}, difference", "better in", "heads", "parameters"]
  header += [_COSTS[name] for name in costs]
  diverged = any(row.failed for row in rows)
  header += ["diverged"] * diverged
  lines = [header, ["---"] * len(header)]
  for row in rows:
    finished = row.runs - row.failed
    cells = [row.variant]
    if swept:
      setting = row.setting.partition("=")[2]
      cells.append(f"**{setting}**" if row.best and setting else setting)
    shown = [str(spread) for spread in row.metrics.values()]
    pairs = len(row.difference.values)
    compared = [row.difference.text("+.4f"), f"{row.better} of {pairs}"]
    if not pairs:
      compared = ["-", "-"]
    share = f"{row.activated_share:.1%}"
    if row.variant == rows[0].variant and row.best:
      compared = ["", ""]
    if not finished:
      shown, share = ["-"] * len(names), "-"
    if row.failed:
      shown[0] += f" ({finished} of {row.runs} runs)"
    cells += [*shown, *compared, share, f"{row.costs['parameters']:,.0f}"]
    for name in costs:
      cells.append(f"{row.costs[name] / rows[0].costs[name]:.2f}")
    if (spread := row.costs.get("step_spread")) and row is not rows[0]:
      cells[-1] += f" ± {float(cells[-1]) * spread / 2:.2f}"
    cells += [f"{row.failed} of {row.runs}"] * diverged
    lines.append(cells)
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plot(rows: Sequence[Row]) -> Any:
  """The first metric over the activated share: every seed, mean and spread.

  Returns:
    A figure with the best setting of each variant.
  """
  name = next(iter(rows[0].metrics))
  figure = pictures.new_figure(figsize=(5.6, 3.8), layout="constrained")
  axis = figure.subplots()
  shown = [row for row in rows if row.best]
  for row, color in zip(shown, pictures.head_colors(len(shown))):
    spread, share = row.metrics[name], row.activated_share
    label = f"{row.variant} {row.setting}".rstrip()
    if row.failed:
      label += f" ({row.failed} of {row.runs} diverged)"
    axis.plot(
      [share] * len(spread.values), spread.values, "o", color=color, alpha=0.4
    )
    axis.errorbar(
      *([share], [spread.mean], [spread.deviation]),
      color=color, label=label, marker="_", markersize=14, capsize=4,
    )  # fmt: skip
  axis.set_xlabel("activated share of the heads")
  axis.set_ylabel(name)
  axis.grid(alpha=0.3)
  if shown:
    axis.legend(fontsize=8)
  return figure
