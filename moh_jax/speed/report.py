"""What `bench` reports: rows, their table and their plot."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from moh_jax.data.extras import import_extra


@dataclasses.dataclass(frozen=True)
class Row:
  """One thing that was measured; None where a figure does not apply.

  Attributes:
    device: kind of the device.
    op: "attention", "layer", "decode" or "model".
    mode: what ran: "forward", "forward_backward", "causal", "decode", ...
    length: tokens of a sequence, or slots of a cache.
    share: of the heads that are at work, in (0, 1].
    implementation: of the attention; "mha" for multi-head attention, by its
      fastest form.
    ms: median time of one evaluation.
    spread: (75th - 25th percentile) / median of the time.
    ratio_to_dense: time over that of the fastest form that computes every
      head, at the same share.
    ratio_to_mha: time over that of multi-head attention.
    units_per_second: tokens, or images of a vision model.
    flops: of one evaluation, analytic: what the heads at work need, whatever
      an implementation computes besides.
    peak_share: FLOPs per second over the device's measured matrix peak.
    peak_bytes: what XLA allocates for the program: arguments, outputs and
      temporaries.
    max_error: the largest relative error against the dense form.
    fault: what is above its limit in the error, in words.
  """

  device: str
  op: str
  mode: str
  length: int | None
  share: float
  implementation: str
  ms: float
  spread: float
  ratio_to_dense: float | None
  ratio_to_mha: float
  units_per_second: float
  flops: float | None = None
  peak_share: float | None = None
  peak_bytes: int | None = None
  max_error: float | None = None
  fault: str | None = None

  @property
  def model_units(self) -> float | None:
    """Units per second of a model; of its parts they say no more than ms."""
    return self.units_per_second if self.op == "model" else None

  @property
  def name(self) -> str:
    """Names the row in messages."""
    length = "" if self.length is None else f", length {self.length}"
    return (
      f"{self.op} {self.mode}{length}, share {self.share:.1%}, "
      f"{self.implementation}"
    )


_LINES = ("-", "--", ":", "-.")  # of a plot, by share
# Title, field, how it is written.
_COLUMNS = (
  ("mode", "mode", str),
  ("length", "length", str),
  ("share", "share", "{:.1%}".format),
  ("implementation", "implementation", str),
  ("ms", "ms", "{:.3f}".format),
  ("spread", "spread", "{:.0%}".format),
  ("to dense", "ratio_to_dense", "{:.3f}".format),
  ("to MHA", "ratio_to_mha", "{:.3f}".format),
  ("units/s", "model_units", "{:,.2f}".format),
  ("GFLOP", "flops", lambda value: f"{value / 1e9:.3f}"),
  ("of peak", "peak_share", "{:.1%}".format),
  ("MB", "peak_bytes", lambda value: f"{value / 1e6:.1f}"),
  ("max error", "max_error", "{:.1e}".format),
)


def table_cells(rows: Sequence[Row]) -> tuple[list[tuple], list[str]]:
  """The cells of a table of rows, and its header.

  Columns that apply to no row are left out.
  """
  columns = [
    column
    for column in _COLUMNS
    if any(getattr(row, column[1]) is not None for row in rows)
  ]
  cells = [
    tuple(_cell(getattr(row, field), write) for _, field, write in columns)
    for row in rows
  ]
  return cells, [title for title, *_ in columns]


def _cell(value: Any, write: Any) -> str:
  return "" if value is None else write(value)


def check_plot(path: str) -> None:
  """Refuses what `plot` could not write, before anything is measured.

  Raises:
    ValueError: matplotlib is missing or does not write such files.
    FileNotFoundError: the file's folder does not exist.
  """
  known = sorted(_figure().canvas.get_supported_filetypes())
  file = pathlib.Path(path)
  if file.suffix[1:].lower() not in known:
    raise ValueError(f"--plot {path} must end in one of .{', .'.join(known)}")
  if not file.parent.is_dir():
    raise FileNotFoundError(f"--plot {path}: {file.parent} is no folder")


def plot(rows: Sequence[Row], path: str) -> None:
  """Draws the time over that of multi-head attention, a panel for each mode.

  A line over the lengths for each form, coloured by implementation and dashed
  by share; bars show the spread.

  Args:
    rows: measured.
    path: an image file.
  """
  modes = list(dict.fromkeys(row.mode for row in rows))
  shares = sorted({row.share for row in rows}, reverse=True)
  names = list(dict.fromkeys(row.implementation for row in rows))
  figure = _figure(figsize=(3 + 4 * len(modes), 4), layout="constrained")
  axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
  for axis, mode in zip(axes, modes):
    here = [row for row in rows if row.mode == mode]
    lengths = sorted({row.length for row in here if row.length is not None})
    for name, share in dict.fromkeys((r.implementation, r.share) for r in here):
      line = [r for r in here if (r.implementation, r.share) == (name, share)]
      line.sort(key=lambda row: row.length or 0)
      axis.errorbar(
        [lengths.index(row.length) if lengths else 0 for row in line],
        [row.ratio_to_mha for row in line],
        [row.ratio_to_mha * row.spread / 2 for row in line],
        color=f"C{names.index(name)}",
        linestyle=_LINES[shares.index(share) % len(_LINES)],
        marker="o",
        markersize=4,
        capsize=2,
        label=f"{name}, {share:.0%}",
      )
    axis.set_title(mode)
    axis.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axis.set_xlabel("length")
    axis.grid(axis="y", alpha=0.3)
  axes[0].set_ylabel("time / time of multi-head attention")
  labels = {
    label: handle
    for axis in axes
    for handle, label in zip(*axis.get_legend_handles_labels())
  }
  figure.legend(labels.values(), labels, loc="outside right upper")
  figure.suptitle(f"{rows[0].op}, {rows[0].device}")
  figure.savefig(path, dpi=150)


def _figure(**options: Any) -> Any:
  module = import_extra("matplotlib.figure", "--plot", "plot")
  return module.Figure(**options)
