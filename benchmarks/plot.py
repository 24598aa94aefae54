"""Draws stored results of `bench`, but not its rows of every head.

For instance benchmarks/results/attention_cpu.json as docs/attention_cpu.svg.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

from benchmarks.rows import Row, read_rows

_LINES = ("-", "--", ":", "-.")  # line styles, one for each share


def main() -> None:
  """Draws a file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("results", metavar="JSON", help="what --json wrote")
  parser.add_argument("--out", required=True, metavar="FILE")
  parser.add_argument("--modes", help="passes, without it all: forward,step")
  args = parser.parse_args()
  stored = json.loads(pathlib.Path(args.results).read_text())
  rows = [row for row in read_rows(stored) if row.share < 1]
  if args.modes:
    rows = [row for row in rows if row.mode in args.modes.split(",")]
  draw(rows, args.out)


def draw(rows: Sequence[Row], path: str) -> None:
  """Plots times over the time of multi-head attention, a panel for each mode.

  Each form has a line over the lengths, its colour chosen by implementation and
  its line style by share; error bars show the spread of the ratio.

  Args:
    rows: measurements of one op; those without a time are left out.
    path: image file to write.
  """
  from matplotlib.figure import Figure

  rows = [row for row in rows if row.ratio_to_mha is not None]
  modes = list(dict.fromkeys(row.mode for row in rows))
  shares = sorted({row.share for row in rows}, reverse=True)
  names = list(dict.fromkeys(row.implementation for row in rows))
  figure = Figure(figsize=(3 + 4 * len(modes), 4), layout="constrained")
  axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
  for axis, mode in zip(axes, modes):
    here = [row for row in rows if row.mode == mode]
    lengths = sorted({row.length for row in here})
    for name, share in dict.fromkeys((r.implementation, r.share) for r in here):
      line = [r for r in here if (r.implementation, r.share) == (name, share)]
      line.sort(key=lambda row: row.length)
      axis.errorbar(
        [lengths.index(row.length) for row in line],
        [row.ratio_to_mha for row in line],
        [row.ratio_to_mha * (row.ratio_spread or 0) / 2 for row in line],
        color=f"C{names.index(name)}",
        linestyle=_LINES[shares.index(share) % len(_LINES)],
        marker="o",
        markersize=4,
        capsize=2,
        label=f"{name}, {share:.0%}",
      )
    axis.set_title(mode)
    axis.set_xticks(range(len(lengths)), [str(n or "") for n in lengths])
    axis.set_xlabel("length")
    axis.grid(axis="y", alpha=0.3)
  axes[0].set_ylabel("time / time of multi-head attention")
  labels = {
    label: handle
    for axis in axes
    for handle, label in zip(*axis.get_legend_handles_labels())
  }
  figure.legend(labels.values(), labels, loc="outside right upper")
  devices = dict.fromkeys(row.device for row in rows)
  figure.suptitle(f"{rows[0].op}, {', '.join(devices)}")
  figure.savefig(path, dpi=150)


if __name__ == "__main__":
  main()
