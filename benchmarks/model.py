"""Records the times of whole models, which `moh_jax bench model` measures.

python -m benchmarks.model --model moh-llm-s-75 --json llm.json
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import finish
from benchmarks.rows import Row
from moh_jax.cli import bench, flags
from moh_jax.cli.main import report_errors
from moh_jax.config import Config, to_dict
from moh_jax.ops.target import target


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a table, which JSON has with the machine."""
  argv = sys.argv[1:] if argv is None else argv
  parser = flags.make_parser("python -m benchmarks.model", bench.ModelOptions)
  given = flags.parse(parser, bench.ModelOptions, argv)

  def call() -> int:
    run = given.timed()
    rows = [
      dataclasses.asdict(row)
      for found in bench.measure_model(run, given.rounds)
      for row in as_rows(run, found)
    ]
    finish(
      given,
      rows,
      settings={**dataclasses.asdict(given), "config": to_dict(run)},
    )
    return 0

  return report_errors(call, given.traceback)


def as_rows(run: Config, found: dict[str, Any]) -> tuple[Row, Row]:
  """The rows of a model and of its baseline, of a row of `measure_model`."""
  length = getattr(run.data, "sequence_length", None)
  case = target().kind, "model", found["mode"], length
  ours = Row(
    *(*case, run.model.activated_share, "auto"),
    ms=found["ms"],
    ratio_to_mha=found["ratio"],
    ratio_spread=found["spread"],
    units_per_second=found["units_per_second"],
  )
  mha = Row(
    *(*case, 1.0, "mha"),
    ms=found["mha_ms"],
    units_per_second=found["mha_per_second"],
  )
  return ours, mha


if __name__ == "__main__":
  sys.exit(main())
