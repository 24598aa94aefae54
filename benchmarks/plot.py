"""Draws stored results of `bench`, but not its rows of every head.

For instance benchmarks/results/attention_cpu.json as docs/attention_cpu.svg.
"""

import argparse
import json
import pathlib

from moh_jax.speed import report


def main() -> None:
  """Draws a file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("results", metavar="JSON", help="what --json wrote")
  parser.add_argument("--out", required=True, metavar="FILE")
  args = parser.parse_args()
  stored = json.loads(pathlib.Path(args.results).read_text())
  report.check_plot(args.out)
  rows = [report.Row(**row) for row in stored["rows"]]
  report.plot([row for row in rows if row.share < 1], args.out)


if __name__ == "__main__":
  main()
