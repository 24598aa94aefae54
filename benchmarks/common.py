"""What benchmarks share: their options, and how they give their results."""

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moh_jax.cli import bench, bench_attention, command, flags
from moh_jax.cli.main import report_errors
from moh_jax.training.bench import machine


def attempt(call: Callable, *args: Any, **options: Any) -> Any:
  """What a call returns or raises: compilers and drivers share no error."""
  try:
    return call(*args, **options)
  except Exception as error:
    return error


def make_parser(doc: str, rounds: int = 0) -> argparse.ArgumentParser:
  """A parser with --json, and with --rounds if they have a default.

  Args:
    doc: of the benchmark; its first line describes it.
    rounds: measured turns.
  """
  parser = argparse.ArgumentParser(description=doc.splitlines()[0])
  parser.add_argument("--json", metavar="FILE", help="'-' is stdout")
  if rounds:
    parser.add_argument("--rounds", type=int, default=rounds)
  return parser


def finish(
  args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], **result: Any
) -> None:
  """Prints rows as a table, and writes them with the machine where asked.

  Args:
    args: of a parser of `make_parser`.
    rows: values by name, the same names in each.
    **result: what JSON holds beside the machine and the rows.
  """
  result = {"machine": machine(), **result, "rows": rows}
  command.Output(json=args.json).give(result, [table_of(rows)])


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
  """Rows as a table."""
  cells = [
    [f"{x:.4g}" if isinstance(x, float) else x for x in row.values()]
    for row in rows
  ]
  return command.table(cells, list(rows[0])) if rows else "no rows"


def run_heads(
  doc: str,
  argv: Sequence[str] | None,
  cls: type[bench.HeadOptions],
  *benchmark: Any,
) -> int:
  """Runs a benchmark of heads; 1 if a form is not exact or does not run.

  Args:
    doc: of the benchmark.
    argv: its arguments.
    cls: its options.
    *benchmark: the other arguments of `bench_attention.compare_forms`.
  """
  argv = sys.argv[1:] if argv is None else argv
  name = pathlib.Path(sys.argv[0]).stem
  parser = flags.make_parser(f"python -m benchmarks.{name}", cls)
  parser.description = doc.splitlines()[0]
  given = flags.parse(parser, cls, argv)

  def call() -> int:
    rows = bench_attention.compare_forms(given, *benchmark)
    return bench.report(given, rows, given.values())

  return report_errors(call, given.traceback)
