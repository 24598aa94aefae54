"""`python -m moh_jax bench`."""

import argparse
import dataclasses
import importlib
import sys
from typing import Any

from moh_jax import config as config_lib
from moh_jax.cli import common, fields
from moh_jax.cli.arguments.speed import OPS
from moh_jax.data.infer import resolve
from moh_jax.runtime import checkpoint
from moh_jax.speed import report, timing
from moh_jax.speed.options import ModelOptions
from moh_jax.speed.programs import (
  compiling_for,
  exact_products,
  matrix_peak,
  memory_peak,
)


def run(args: argparse.Namespace) -> int:
  """Prints a table of what was measured; 1 if any of it is not exact."""
  if args.op in ("card", "input"):
    module = importlib.import_module(f"moh_jax.cli.bench_{args.op}")
    return module.run(args)
  if args.plot:
    report.check_plot(args.plot)
  result = (_run_model if args.op == "model" else _run_heads)(args)
  rows = result["rows"]
  if args.json != "-":
    _print(result)
  if args.plot and rows:
    report.plot(rows, args.plot)
  result["rows"] = [dataclasses.asdict(row) for row in rows]
  common.write_json(args.json, result)
  for row in rows:
    if row.fault:
      print(f"error: {row.name}: {row.fault}", file=sys.stderr)
  return 1 if any(row.fault for row in rows) else 0


def _run_heads(args: argparse.Namespace) -> dict[str, Any]:
  _, kind = OPS[args.op]
  module = importlib.import_module(f"moh_jax.speed.{args.op}")
  with compiling_for(args.target):
    options = kind(**fields.given_fields(args, kind))
    peaks = {}
    with exact_products(options.dtype):
      if args.target:
        rows = module.measure(options)
      else:
        # Before and after: a phase may be slow.
        first = matrix_peak(options.dtype)
        rows = module.measure(options)
        rates = [row.rate for row in rows if row.rate]
        peaks = {
          "matrix_peak": max(first, matrix_peak(options.dtype), *rates),
          "memory_peak": memory_peak(),
        }
        rows = report.with_peaks(rows, *peaks.values())
  return {
    "machine": timing.machine(),
    **peaks,
    "target": args.target,
    "settings": dataclasses.asdict(options),
    "rows": rows,
  }


def _run_model(args: argparse.Namespace) -> dict[str, Any]:
  from moh_jax.speed import model

  if args.checkpoint:
    args.config = checkpoint.read_metadata(args.checkpoint)[0].config
  elif args.config:
    args.config = resolve(args.config)
  options = ModelOptions(**fields.given_fields(args, ModelOptions))
  measured = model.measure(options)
  run = options.runs()[-1]
  settings = {**vars(options), "config": config_lib.to_dict(run)}
  return {"machine": timing.machine(), "settings": settings, **measured}


def _print(result: dict[str, Any]) -> None:
  if result["rows"]:
    print(common.table(*report.table_cells(result["rows"])))
  if "matrix_peak" in result:
    dtype = result["settings"]["dtype"]
    print(f"matrix peak: {result['matrix_peak'] / 1e9:,.1f} GFLOP/s ({dtype})")
  if result.get("memory_peak"):
    print(f"memory peak: {result['memory_peak'] / 1e9:,.1f} GB/s")
  if result.get("target"):
    print(
      f"compiled for {result['rows'][0].device}, which is not here: no times"
    )
  for part in ("train_step", "sampler"):
    for name, value in result.get(part, {}).items():
      print(f"{part} {name}: {value:,.3f}".rstrip("0").rstrip("."))
