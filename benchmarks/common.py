"""What benchmarks share: their options, and how they give their results."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.cli import bench, common, fields
from moh_jax.cli.arguments import speed
from moh_jax.cli.main import report_errors
from moh_jax.training import timing


def make_parser(doc: str, rounds: int = 0) -> argparse.ArgumentParser:
  """A parser with --json, and with --rounds if they have a default.

  Args:
    doc: of the benchmark; its first line describes it.
    rounds: measured turns.
  """
  parser = argparse.ArgumentParser(description=doc.splitlines()[0])
  common.add_json(parser)
  if rounds:
    common.add_count(parser, "--rounds", rounds, help="measured turns")
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
  if args.json != "-":
    print_rows(rows)
  result = {"machine": timing.machine(), **result, "rows": rows}
  common.write_json(args.json, result)


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
  """Prints rows as a table."""
  cells = [
    [f"{x:.4g}" if isinstance(x, float) else x for x in row.values()]
    for row in rows
  ]
  print(common.table(cells, list(rows[0])) if rows else "no rows")


def run_heads(
  doc: str,
  argv: Sequence[str] | None,
  cls: type[speed.HeadOptions],
  *benchmark: Any,
) -> int:
  """Runs a benchmark of heads; 1 if a form is not exact or does not run.

  Args:
    doc: of the benchmark.
    argv: its arguments.
    cls: its options.
    *benchmark: the other arguments of `moh_jax.cli.bench.compare_forms`.
  """
  parser = make_parser(doc)
  names = [f.name for f in dataclasses.fields(cls) if f.init]
  fields.add_fields(parser, cls, *names)
  parser.add_argument("--traceback", action="store_true")
  args = parser.parse_args(argv)

  def call() -> int:
    options = cls(**fields.given_fields(args, cls, *names))
    result = bench.run_heads(options, *benchmark)
    return bench.report(args.json, result)

  return report_errors(call, args.traceback)
