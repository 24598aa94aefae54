"""`python -m moh_jax parity`."""

import argparse
import dataclasses

from moh_jax.cli import common
from moh_jax.parity.compare import Row, run_case


def run(args: argparse.Namespace) -> int:
  """Prints the errors of every array; 1 if any is above its tolerance."""
  rows = [row for case in args.cases for row in run_case(case)]
  failed = [row for row in rows if not row.ok]
  if args.json != "-":
    shown = failed if args.failures else rows
    header = ("case", "array", "max abs", "max rel", "tolerance", "")
    if shown:
      print(common.table([_cells(row) for row in shown], header))
    print(
      f"{len(args.cases)} case(s), {len(rows)} arrays, {len(failed)} failed"
    )
  common.write_json(args.json, [dataclasses.asdict(row) for row in rows])
  return 1 if failed else 0


def _cells(row: Row) -> tuple[str, ...]:
  errors = ("not compared", "")
  if row.max_abs is not None:
    errors = (f"{row.max_abs:.2e}", f"{row.max_rel:.2e}")
  verdict = "ok" if row.ok else "FAILED"
  return row.case, row.array, *errors, f"{row.tolerance:.0e}", verdict
