"""Report of a benchmark: its rows, their table and their plot."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from moh_jax.data.extras import import_extra


@dataclasses.dataclass(frozen=True)
class Row:
  """One measurement; None where a value does not apply.

  Attributes:
    device: kind of the device, such as "NVIDIA H100".
    op: "attention", "layer", "decode" or "model".
    mode: passes that ran: "forward", "forward_backward", "causal", "decode"...
    length: tokens of a sequence, or slots of a cache; None for images.
    share: active heads over all heads, in (0, 1].
    implementation: form of attention; "mha" is multi-head attention in its
      fastest form.
    ms: median milliseconds of one evaluation; None if it did not run.
    spread: (75th - 25th percentile) / median of the time.
    ratio_to_mha: median ratio to the time of multi-head attention in the same
      turn.
    ratio_spread: (75th - 25th percentile) / median of that ratio.
    form: name of the form of attention that ran, such as "packed", or of each
      of a model's forms.
    computed_share: heads that attention computes over all heads; 1 where none
      is left out.
    units_per_second: tokens per second, or images of a vision model.
    every_head: whether the form computes every head, or the active ones only.
    measured: False for a device that is not here, of which the compiler alone
      tells something.
    flops: FLOPs of one evaluation that the active heads need, counted from the
      shapes, whatever else the form computes.
    peak_share: FLOPs per second over the device's matrix peak, see
      `with_peaks`.
    peak_bytes: memory that XLA allocates for the program: arguments, outputs
      and temporaries.
    temporary_bytes: the temporaries of `peak_bytes`.
    moved_bytes: bytes that one evaluation reads and writes.
    moved_by: "compiler" if it counted them; "count" if they are the least that
      the shapes allow, where the compiler cannot count: kernels and loops.
    memory_share: moved bytes per second over the memory's measured speed.
    kernels: how many calls of each kernel the program has that XLA did not
      make, by its name.
    max_error: largest relative error against the dense form.
    fault: which error exceeds its limit, or why it did not run, in words; None
      if nothing is wrong.
  """

  device: str
  op: str
  mode: str
  length: int | None
  share: float
  implementation: str
  ms: float | None = None
  spread: float | None = None
  ratio_to_mha: float | None = None
  ratio_spread: float | None = None
  form: str | None = None
  computed_share: float | None = None
  units_per_second: float | None = None
  flops: float | None = None
  peak_share: float | None = None
  peak_bytes: int | None = None
  max_error: float | None = None
  fault: str | None = None
  every_head: bool | None = None
  measured: bool = True
  temporary_bytes: int | None = None
  moved_bytes: int | None = None
  moved_by: str = ""
  memory_share: float | None = None
  kernels: dict[str, int] | None = None

  @property
  def to_mha(self) -> str | None:
    """The ratio with half its spread: "0.58 ± 0.02", to the spread's digit."""
    if self.ratio_to_mha is None:
      return None
    half = self.ratio_to_mha * (self.ratio_spread or 0) / 2
    if not half:
      return f"{self.ratio_to_mha:.2f}"
    digits = min(4, max(0, -math.floor(math.log10(half))))
    return f"{self.ratio_to_mha:.{digits}f} ± {half:.{digits}f}"

  @property
  def rate(self) -> float | None:
    """FLOPs per second; None where they are not counted or not timed."""
    return self.flops / self.ms * 1e3 if self.flops and self.ms else None

  @property
  def model_units(self) -> float | None:
    """`units_per_second` of models; for other ops, ms already says it."""
    return self.units_per_second if self.op == "model" else None

  @property
  def moved(self) -> str | None:
    """Moved bytes in MB, with a tilde if they are the least possible."""
    if self.moved_bytes is None:
      return None
    tilde = "~" if self.moved_by == "count" else ""
    return f"{tilde}{self.moved_bytes / 1e6:.1f}"

  @property
  def calls(self) -> str | None:
    """The calls of kernels, such as "2 tpu_custom_call"."""
    if not self.kernels:
      return None
    return ", ".join(f"{n} {name}" for name, n in sorted(self.kernels.items()))

  @property
  def name(self) -> str:
    """Short description of the row for messages."""
    length = "" if self.length is None else f", length {self.length}"
    return (
      f"{self.op} {self.mode}{length}, share {self.share:.1%}, "
      f"{self.implementation}"
    )


_LINES = ("-", "--", ":", "-.")  # line styles of the plot, one for each share
# Title of a column, field of `Row`, function that formats it.
_COLUMNS = (
  ("mode", "mode", str),
  ("length", "length", str),
  ("share", "share", "{:.1%}".format),
  ("implementation", "implementation", str),
  ("form", "form", str),
  ("computed", "computed_share", "{:.1%}".format),
  ("ms", "ms", "{:.3f}".format),
  ("spread", "spread", "{:.0%}".format),
  ("to MHA", "to_mha", str),
  ("units/s", "model_units", "{:,.2f}".format),
  ("GFLOP", "flops", lambda value: f"{value / 1e9:.3f}"),
  ("of peak", "peak_share", "{:.1%}".format),
  ("MB", "peak_bytes", lambda value: f"{value / 1e6:.1f}"),
  ("temp MB", "temporary_bytes", lambda value: f"{value / 1e6:.1f}"),
  ("moved MB", "moved", str),
  ("of memory", "memory_share", "{:.1%}".format),
  ("kernels", "calls", str),
  ("max error", "max_error", "{:.1e}".format),
)


def table_cells(rows: Sequence[Row]) -> tuple[list[tuple], list[str]]:
  """The formatted cells of each row, and the header of the table.

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


def with_peaks(
  rows: Sequence[Row], peak: float | None, memory: float | None = None
) -> list[Row]:
  """Judges rows by the device's peaks.

  Args:
    rows: timed rows.
    peak: the device's measured matrix peak, FLOP/s; where a row is faster, the
      peak was measured in a slow phase, and the fastest row stands for it.
    memory: the measured speed of its memory, bytes/s.
  """
  fastest = max((row.rate or 0 for row in rows), default=0)
  return [
    dataclasses.replace(
      row,
      peak_share=row.rate / max(peak, fastest) if peak and row.rate else None,
      memory_share=row.moved_bytes / row.ms * 1e3 / memory
      if memory and row.moved_bytes and row.ms
      else None,
    )
    for row in rows
  ]


def check_plot(path: str) -> None:
  """Checks that `plot` can write a file, before anything is measured.

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
  """Plots times over the time of multi-head attention, a panel for each mode.

  Each form has a line over the lengths, its colour chosen by implementation and
  its line style by share; error bars show the spread of the ratio.

  Args:
    rows: measurements of one op; those without a time are left out.
    path: image file to write.
  """
  rows = [row for row in rows if row.ratio_to_mha is not None]
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
        [row.ratio_to_mha * (row.ratio_spread or 0) / 2 for row in line],
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
