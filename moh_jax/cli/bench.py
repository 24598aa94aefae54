"""`python -m moh_jax bench`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from moh_jax.cli import common
from moh_jax.speed import attention, decode, layer, report, timing
from moh_jax.speed.exactness import LIMITS
from moh_jax.speed.options import MODES, HeadOptions, SequenceOptions
from moh_jax.speed.programs import exact_products, matrix_peak

# What is compared -> the function that measures, and its options.
_OPS: dict[str, tuple[Callable, type[HeadOptions]]] = {
  "attention": (attention.measure, SequenceOptions),
  "layer": (layer.measure, layer.LayerOptions),
  "decode": (decode.measure, decode.DecodeOptions),
}
_HELP = {
  "attention": "the core alone: outputs of heads from queries, keys, values",
  "layer": "a whole layer with its router, and the same layer without one",
  "decode": "one new token against a cache of keys and values",
  "model": "a released model and its multi-head baseline",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  ops = parser.add_subparsers(
    dest="op", required=True, metavar="OP", help=", ".join(_HELP)
  )
  for op, text in _HELP.items():
    sub = ops.add_parser(
      op,
      help=text,
      description=f"Time {text}.",
      argument_default=argparse.SUPPRESS,  # what was not given
    )
    if op == "model":
      _add_model(sub)
    else:
      _add_heads(sub, op)
    _add_common(sub)


def run(args: argparse.Namespace) -> int:
  """Prints a table of what was measured; 1 if any of it is not exact."""
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
  measure, kind = _OPS[args.op]
  options = _options(kind, args)
  with exact_products(options.dtype):
    peak = matrix_peak(options.dtype)
    rows = measure(options, peak)
  return {
    "machine": timing.machine(),
    "matrix_peak": peak,
    "settings": dataclasses.asdict(options),
    "rows": rows,
  }


def _run_model(args: argparse.Namespace) -> dict[str, Any]:
  from moh_jax.speed import model

  options = _options(model.ModelOptions, args)
  measured = model.measure(options)
  settings = dataclasses.asdict(options)
  return {"machine": timing.machine(), "settings": settings, **measured}


def _options(kind: type, args: argparse.Namespace) -> Any:
  """The options that were given, in their class."""
  names = [field.name for field in dataclasses.fields(kind)]
  return kind(**{n: getattr(args, n) for n in names if hasattr(args, n)})


def _print(result: dict[str, Any]) -> None:
  if result["rows"]:
    print(common.table(*report.table_cells(result["rows"])))
  if "matrix_peak" in result:
    dtype = result["settings"]["dtype"]
    print(f"matrix peak: {result['matrix_peak'] / 1e9:,.1f} GFLOP/s ({dtype})")
  for part in ("train_step", "sampler"):
    for name, value in result.get(part, {}).items():
      print(f"{part} {name}: {value:,.3f}".rstrip("0").rstrip("."))


def _add_heads(parser: argparse.ArgumentParser, op: str) -> None:
  defaults = _OPS[op][1]
  unit = "slots of the cache" if op == "decode" else "tokens of a sequence"
  _add_list(parser, "lengths", common.int_tuple, "N", unit, defaults.lengths)
  _add_list(
    parser,
    "shares",
    common.percent_tuple,
    "P",
    "percent of the heads that are at work",
    defaults.shares,
  )
  _add_list(
    parser,
    "implementations",
    _names,
    "NAME",
    f"of {', '.join(defaults.known_implementations)}; 'dense' always runs "
    "(default: what the device can do)",
  )
  if op != "decode":
    modes = f"of {', '.join(MODES)}"
    _add_list(parser, "modes", _names, "MODE", modes, SequenceOptions.modes)
  parser.add_argument("--heads", type=int, help=f"(default: {defaults.heads})")
  parser.add_argument(
    "--head-dim", type=int, help=f"(default: {defaults.head_dim})"
  )
  parser.add_argument("--kv-heads", type=int, help="(default: as many)")
  parser.add_argument(
    "--shared", type=int, help="heads that are always on (default: a quarter)"
  )
  if op == "layer":
    parser.add_argument(
      "--width", type=int, help="of the tokens (default: heads * head dim)"
    )
  if op == "decode":
    parser.add_argument(
      "--cache-dtype",
      choices=decode.CACHE_DTYPES,
      help="(default: the compute dtype)",
    )
  parser.add_argument("--batch", type=int, help=f"(default: {defaults.batch})")


def _add_model(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--model", help="released name (default: moh-vit-s80)")
  _add_list(
    parser, "lengths", common.int_tuple, "N", "tokens of a text", (512,)
  )
  _add_list(
    parser,
    "implementations",
    _names,
    "NAME",
    "forms of attention, each of them a variant of the model",
    ("auto",),
  )
  parser.add_argument("--batch", type=int, help="(default: 4)")
  parser.add_argument("--remat", help="instead of the model's")
  parser.add_argument("--sampler-steps", type=int, help="(default: 10)")
  parser.add_argument(
    "--compile-only",
    action="store_true",
    default=False,
    help="only the train step",
  )


def _add_common(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--dtype", choices=tuple(LIMITS), help="(default: float32)"
  )
  parser.add_argument("--rounds", type=int, help="measured turns (default: 7)")
  common.add_json(parser)
  parser.add_argument(
    "--plot",
    metavar="FILE",
    default="",
    help="draw the ratios; needs matplotlib (the extra moh_jax[plot])",
  )
  parser.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )


def _add_list(
  parser: argparse.ArgumentParser,
  name: str,
  kind: Callable[[str], tuple],
  item: str,
  text: str,
  default: tuple = (),
) -> None:
  if default:
    values = ",".join(
      f"{v:g}" if isinstance(v, float) else str(v) for v in default
    )
    text += f" (default: {values})"
  parser.add_argument(f"--{name}", type=kind, metavar=f"{item},...", help=text)


def _names(text: str) -> tuple[str, ...]:
  """Parses "dense,packed"."""
  return tuple(text.split(","))
