"""Compiled programs, timed in turns and reported as rows of a table."""

import contextlib
import dataclasses
import functools
import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.target import target
from moh_jax.training import timing

# On accelerators the call of a small function takes longer than its evaluation,
# so one call evaluates it this many times.
_LOOPS = 16
# An evaluation of so many FLOPs takes longer than its call, which the device
# does not wait for: 0.1 ms at 1 PFLOP/s.
_LONG_FLOPS = 1e11
_PEAK_CALLS = 10
_CPU_SIZES = (1024, 2048)
_ACCELERATOR_SIZES = (4096, 8192)
_COPY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function with its arguments.

  Attributes:
    run: calls it and returns its arrays.
    loops: evaluations of the function in one call.
    bytes: memory that XLA allocates for one evaluation: arguments, outputs and
      temporaries; None where it is unknown.
    moved_bytes: bytes that the compiler counts as read and written by one
      evaluation; None where it does not count them, or not right: what a kernel
      reads again, and what a loop moves after its first iteration, is missing.
  """

  run: Callable[[], Any]
  loops: int = 1
  bytes: int | None = None
  moved_bytes: int | None = None


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
    flops: FLOPs of one evaluation that the active heads need, counted from the
      shapes, whatever else the form computes.
    peak_share: FLOPs per second over the device's matrix peak, see
      `with_peaks`.
    peak_bytes: memory that XLA allocates for the program: arguments, outputs
      and temporaries.
    max_error: largest relative error against the dense form.
    fault: which error exceeds its limit, or why it did not run, in words; None
      if nothing is wrong.
    every_head: whether the form computes every head, or the active ones only.
    moved_bytes: bytes that one evaluation reads and writes.
    moved_by: "compiler" if it counted them; "count" if they are the least that
      the shapes allow, where the compiler cannot count: kernels and loops.
    memory_share: moved bytes per second over the memory's measured speed.
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
  moved_bytes: int | None = None
  moved_by: str = ""
  memory_share: float | None = None

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
  def name(self) -> str:
    """Short description of the row for messages."""
    length = "" if self.length is None else f", length {self.length}"
    return (
      f"{self.op} {self.mode}{length}, share {self.share:.1%}, "
      f"{self.implementation}"
    )


def _megabytes(value: int) -> str:
  return f"{value / 1e6:.1f}"


# Title of a column, field of `Row`, what formats it.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
  ("mode", "mode", str),
  ("length", "length", str),
  ("share", "share", "{:.1%}".format),
  ("implementation", "implementation", str),
  ("form", "form", str),
  ("computed", "computed_share", "{:.1%}".format),
  ("ms", "ms", "{:.3f}".format),
  ("spread", "spread", "{:.0%}".format),
  ("to MHA", "to_mha", str),
  ("units/s", "units_per_second", "{:,.2f}".format),
  ("GFLOP", "flops", lambda value: f"{value / 1e9:.3f}"),
  ("of peak", "peak_share", "{:.1%}".format),
  ("MB", "peak_bytes", _megabytes),
  ("moved MB", "moved_bytes", _megabytes),
  ("of memory", "memory_share", "{:.1%}".format),
  ("max error", "max_error", "{:.1e}".format),
)


def table_cells(rows: Sequence[Row]) -> tuple[list[tuple], list[str]]:
  """The formatted cells of each row, and the header of the table.

  Columns that apply to no row are left out, and units per second but for
  models: for other ops, ms already says it. Moved bytes that are the least
  possible have a tilde.
  """

  def cell(row: Row, field: str, write: Callable[[Any], str]) -> str:
    value = getattr(row, field)
    unused = field == "units_per_second" and row.op != "model"
    if value is None or unused:
      return ""
    tilde = field == "moved_bytes" and row.moved_by == "count"
    return "~" * tilde + write(value)

  columns = {
    title: [cell(row, field, write) for row in rows]
    for title, field, write in _COLUMNS
  }
  columns = {title: cells for title, cells in columns.items() if any(cells)}
  return list(zip(*columns.values())), list(columns)


def read_rows(result: Mapping[str, Any]) -> list[Row]:
  """The rows of a stored result, without fields of other versions."""
  names = {field.name for field in dataclasses.fields(Row)}
  return [
    Row(**{name: row[name] for name in names & row.keys()})
    for row in result["rows"]
  ]


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


def time_rows(
  rows: Sequence[Row],
  programs: Sequence[Program | None],
  *,
  mha: Collection[int],
  units: int,
  rounds: int,
  min_seconds: float = 0.005,
) -> list[Row]:
  """Times programs in turns and adds to their rows what was measured.

  Args:
    rows: what is known of each program; what the compiler counts as moved
      takes the place of what they say.
    programs: of the rows; None where one could not be compiled.
    mha: numbers of the rows of multi-head attention. The fastest one is named
      "mha", and the others are compared with it.
    units: tokens or images of one evaluation.
    rounds: measured turns.
    min_seconds: seconds that a turn lasts at least; shorter programs are
      repeated in it.
  """
  here = {i: one for i, one in enumerate(programs) if one}
  times = timing.interleaved(
    {i: one.run for i, one in here.items()},
    rounds,
    min_seconds,
    {i: one.loops for i, one in here.items()},
  )
  timed = [i for i in mha if i in times]
  fastest = min(timed, key=lambda i: times[i].median, default=None)
  found = []
  for index, (row, program) in enumerate(zip(rows, programs)):
    if program is None:
      found.append(row)
      continue
    time = times[index]
    added: dict[str, Any] = {
      "ms": time.median * 1e3,
      "spread": time.spread,
      "units_per_second": units / time.median,
      "peak_bytes": program.bytes,
    }
    if program.moved_bytes is not None:
      added |= {"moved_bytes": program.moved_bytes, "moved_by": "compiler"}
    if fastest is not None:
      ratio = time.over(times[fastest])
      added |= {"ratio_to_mha": ratio.median, "ratio_spread": ratio.spread}
    if index == fastest:
      added["implementation"] = "mha"
    found.append(dataclasses.replace(row, **added))
  return found


def compile_program(function: Callable, *args: Any, loops: int = 1) -> Program:
  """Compiles a function for its arguments, which the program keeps.

  Args:
    function: function of trees of arrays.
    *args: its arguments.
    loops: evaluations in one call, one after another; the call returns the
      value of the last one.
  """
  compiled = jax.jit(function).lower(*args).compile()
  # Of a program with loops or calls the compiler does not count all bytes.
  moved, text = None, compiled.as_text() or ""
  if " while(" not in text and " custom-call(" not in text:
    moved = (compiled.cost_analysis() or {}).get("bytes accessed")
  memory = compiled.memory_analysis()
  run = compiled
  if loops > 1:
    run = jax.jit(_loop(function, loops)).lower(*args).compile()
  return Program(
    lambda: run(*args),
    loops,
    bytes=memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes,
    moved_bytes=None if moved is None else int(moved),
  )


def attempt(call: Callable, *args: Any, **options: Any) -> Any:
  """What a call returns or raises: compilers and drivers share no error."""
  try:
    return call(*args, **options)
  except Exception as error:
    return error


def failure(error: Exception) -> str:
  """One line that says why a program does not run."""
  return textwrap.shorten(f"does not run: {type(error).__name__}: {error}", 300)


def _loop(function: Callable, loops: int) -> Callable:
  """Makes a function that evaluates another one `loops` times in sequence."""

  def run(*args: Any) -> Any:
    def body(_, out: Any) -> Any:
      # XLA sees arguments that depend on the last value: it merges nothing.
      again, _ = jax.lax.optimization_barrier((args, out))
      return function(*again)

    shapes = jax.eval_shape(function, *args)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, loops, body, start)

  return run


def default_loops(flops: float = 0.0) -> int:
  """How often one call evaluates a function.

  Args:
    flops: FLOPs of one evaluation.

  Returns:
    1 on CPUs and for long evaluations, else 16.
  """
  on_cpu = target().platform == "cpu"
  return 1 if on_cpu or flops > _LONG_FLOPS else _LOOPS


def exact_products(dtype: str) -> contextlib.AbstractContextManager:
  """Context in which float32 products are exact on devices that round them."""
  if target().platform == "cpu" or dtype != "float32":
    return contextlib.nullcontext()
  return jax.default_matmul_precision("highest")


def matrix_peak(dtype: str) -> float:
  """Measures the device's matrix peak in FLOP/s.

  It is the rate of the fastest call among square products of a few sizes, where
  n x n times n x n counts 2 n^3 FLOPs.

  Args:
    dtype: dtype of the matrices.
  """
  rates = []
  for n in _CPU_SIZES if jax.default_backend() == "cpu" else _ACCELERATOR_SIZES:
    matrix = jax.random.normal(jax.random.key(0), (n, n), dtype)
    rates.append(2 * n**3 / _fastest(_product, matrix, matrix))
  return max(rates)


def memory_peak() -> float | None:
  """Measures the speed of the device's memory in bytes/s, of one large copy.

  It is None on CPUs, whose caches hold most of what is measured.
  """
  if jax.default_backend() == "cpu":
    return None
  source = jnp.ones(_COPY_BYTES // 4, jnp.float32)
  return 2 * _COPY_BYTES / _fastest(_copy, source)


_product, _copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)


def _fastest(function: Callable, *args: Any) -> float:
  """Seconds of the fastest of ten calls."""
  call = functools.partial(function, *args)
  timing.seconds(call)  # warms up
  return min(timing.seconds(call) for _ in range(_PEAK_CALLS))


# Largest allowed relative errors of outputs and of gradients, by dtype.
_LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}


def check_exact(
  found: tuple[Any, Any], expected: tuple[Any, Any], dtype: str
) -> tuple[float, str | None]:
  """Measures the errors of a program's (outputs, gradients).

  Args:
    found: two trees of arrays, from the timed program.
    expected: the same trees from the dense form; gradients may be empty.
    dtype: compute dtype, which decides how large an error may be.

  Returns:
    The larger of both relative errors, NaN if one is NaN; and which of them
    exceeds its limit, in words, None if none does. An error is the largest
    absolute difference over the largest expected magnitude of an array, or the
    difference where that is 0.
  """
  errors = [
    float(np.max(jax.tree.leaves(jax.tree.map(_relative, *trees)), initial=0.0))
    for trees in zip(found, expected)
  ]
  fault = None
  parts = zip(("outputs", "gradients"), errors, _LIMITS[dtype])
  for name, error, limit in parts:
    if not fault and not error <= limit:  # so that NaN is a fault
      fault = f"relative error of the {name} {error:.1e} is above {limit:.0e}"
  return float(np.max(errors)), fault


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
  found, expected = (x.astype(jnp.float32) for x in (found, expected))
  largest = jnp.abs(expected).max()
  difference = jnp.abs(found - expected).max()
  return difference / jnp.where(largest > 0, largest, 1.0)
