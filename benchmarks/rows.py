"""Rows of measured programs: their times, their errors and the machine."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import platform
import subprocess
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax._version import __version__
from moh_jax.ops.target import target
from moh_jax.training.bench import interleaved, seconds, summarize

# On accelerators the call of a small function takes longer than its evaluation,
# so one call evaluates it this many times.
_LOOPS = 16
_SHORT = 1e-3  # seconds of a call that is such a one
# Largest allowed relative errors of outputs and of gradients, by dtype.
_LIMITS = {"float32": (2e-6, 1e-5), "bfloat16": (2e-2, 2e-2)}


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function with its arguments.

  Attributes:
    run: calls it and returns its arrays.
    loops: evaluations of the function in one call.
    bytes: memory that XLA allocates for one evaluation: arguments, outputs and
      temporaries; None where it is unknown.
    compile_seconds: of one evaluation; None where it is unknown.
  """

  run: Callable[[], Any]
  loops: int = 1
  bytes: int | None = None
  compile_seconds: float | None = None


def machine() -> dict[str, object]:
  """Device, processor, versions and commit that a measurement depends on."""
  device = jax.devices()[0]
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "cpu": _cpu_model(),
    "cores": os.cpu_count(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "moh_jax": __version__,
    "commit": _commit(),
  }


def _commit() -> str | None:
  """The last commit that changed the package, "+" if files differ from it.

  None for a package that is not in a git repository of its own.
  """
  done = subprocess.run(
    'c=$(git log -1 --format=%h -- .) && [ "$c" ] && echo $c && '
    "git status --porcelain -- .",
    cwd=pathlib.Path(__file__).parents[1] / "moh_jax",
    shell=True,
    capture_output=True,
    text=True,
    check=False,
  )
  commit, *changed = done.stdout.splitlines() or [None]
  return commit and commit + "+" * bool(changed)


def _cpu_model() -> str:
  try:
    with open("/proc/cpuinfo") as stream:
      names = [line for line in stream if line.startswith("model name")]
    return names[0].partition(":")[2].strip()
  except (OSError, IndexError):
    return platform.processor()


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
    peak_bytes: memory that XLA allocates for the program: arguments, outputs
      and temporaries.
    compile_seconds: seconds to compile the program.
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
  peak_bytes: int | None = None
  compile_seconds: float | None = None
  max_error: float | None = None
  fault: str | None = None

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
  def name(self) -> str:
    """Short description of the row for messages."""
    length = "" if self.length is None else f", length {self.length}"
    return (
      f"{self.op} {self.mode}{length}, share {self.share:.1%}, "
      f"{self.implementation}"
    )


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
  ("MB", "peak_bytes", lambda value: f"{value / 1e6:.1f}"),
  ("compile s", "compile_seconds", "{:.1f}".format),
  ("max error", "max_error", "{:.1e}".format),
)


def table_cells(rows: Sequence[Row]) -> tuple[list[tuple], list[str]]:
  """The formatted cells of each row, and the header of the table.

  Columns that apply to no row are left out, and units per second but for
  models: for other ops, ms already says it.
  """

  def cell(row: Row, field: str, write: Callable[[Any], str]) -> str:
    value = getattr(row, field)
    unused = field == "units_per_second" and row.op != "model"
    return "" if value is None or unused else write(value)

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


def time_rows(
  rows: Sequence[Row],
  programs: Sequence[Program | None],
  *,
  mha: Collection[int],
  units: int,
  rounds: int,
) -> list[Row]:
  """Times programs in turns and adds to their rows what was measured.

  Args:
    rows: what is known of each program.
    programs: of the rows; None where one could not be compiled.
    mha: numbers of the rows of multi-head attention. The fastest one is named
      "mha", and the others are compared with it.
    units: tokens or images of one evaluation.
    rounds: measured turns.
  """
  here = {i: one for i, one in enumerate(programs) if one}
  # Programs of less than 5 ms are repeated in a turn.
  times = interleaved({i: one.run for i, one in here.items()}, rounds, 0.005)
  times = {
    i: summarize([turn / here[i].loops for turn in time.turns])
    for i, time in times.items()
  }
  timed = [i for i in mha if i in times]
  fastest = min(timed, key=lambda i: times[i].median, default=None)
  found = list(rows)
  for index, program in here.items():
    one = times[index]
    added: dict[str, Any] = {
      "ms": one.median * 1e3,
      "spread": one.spread,
      "units_per_second": units / one.median,
      "peak_bytes": program.bytes,
      "compile_seconds": program.compile_seconds,
    }
    if fastest is not None:
      ratio = one.over(times[fastest])
      added |= {"ratio_to_mha": ratio.median, "ratio_spread": ratio.spread}
    if index == fastest:
      added["implementation"] = "mha"
    found[index] = dataclasses.replace(rows[index], **added)
  return found


def compile_program(
  function: Callable, *args: Any, loops: bool = False
) -> Program:
  """Compiles a function for its arguments, which the program keeps.

  Args:
    function: function of trees of arrays.
    *args: its arguments.
    loops: on accelerators, one call of a short function evaluates it several
      times, one after another, and returns the value of the last one.
  """
  start = time.perf_counter()
  compiled = jax.jit(function).lower(*args).compile()
  compile_seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  size = memory.argument_size_in_bytes + memory.output_size_in_bytes
  size += memory.temp_size_in_bytes
  run, count = functools.partial(compiled, *args), 1
  if loops and target().platform != "cpu":
    seconds(run)  # warms up
    if seconds(run) < _SHORT:
      count = _LOOPS
      again = jax.jit(_loop(function, count)).lower(*args).compile()
      run = functools.partial(again, *args)
  return Program(run, count, size, compile_seconds)


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


def failure(error: Exception) -> str:
  """One line that says why a program does not run."""
  return textwrap.shorten(f"does not run: {type(error).__name__}: {error}", 300)


def exact_products(dtype: str) -> contextlib.AbstractContextManager:
  """Context in which float32 products are exact on devices that round them."""
  if target().platform == "cpu" or dtype != "float32":
    return contextlib.nullcontext()
  return jax.default_matmul_precision("highest")


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
