"""Compares our numbers with recorded cases of the public releases."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from moh_jax.cli.command import Output, table
from moh_jax.cli.main import report_errors
from tests.parity.compare import Row, run_case


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m tests.parity`; 1 if an array is off or not compared."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.parity", description=__doc__, allow_abbrev=False
  )
  parser.add_argument("cases", nargs="+", metavar="CASE_DIR")
  parser.add_argument(
    "--failures", action="store_true", help="print only rows that fail"
  )
  parser.add_argument("--json", metavar="FILE", help="'-' is stdout")
  parser.add_argument("--traceback", action="store_true")
  args = parser.parse_args(argv)
  return report_errors(lambda: _run(args), args.traceback)


def _run(args: argparse.Namespace) -> int:
  output = Output(json=args.json)
  output.prepare()
  rows = [row for case in args.cases for row in run_case(case)]
  failed = [row for row in rows if not row.ok]
  shown = failed if args.failures else rows
  header = ("case", "array", "max abs", "max rel", "tolerance", "")
  lines = [table([_cells(row) for row in shown], header)] if shown else []
  lines.append(
    f"{len(args.cases)} case(s), {len(rows)} arrays, {len(failed)} failed"
  )
  output.give([dataclasses.asdict(row) for row in rows], lines)
  return 1 if failed else 0


def _cells(row: Row) -> tuple[str, ...]:
  errors = ("not compared", "")
  if row.max_abs is not None:
    errors = (f"{row.max_abs:.2e}", f"{row.max_rel:.2e}")
  verdict = "ok" if row.ok else "FAILED"
  return row.case, row.array, *errors, f"{row.tolerance:.0e}", verdict


if __name__ == "__main__":
  sys.exit(main())
