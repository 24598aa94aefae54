"""Options of `python -m moh_jax parity`."""

import argparse

from moh_jax.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument("cases", nargs="+", metavar="CASE_DIR")
  parser.add_argument(
    "--failures", action="store_true", help="print only rows that fail"
  )
  common.add_json(parser)
