"""What benchmarks share: their options, and how they give their results."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.rows import machine
from moh_jax.cli import command


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
