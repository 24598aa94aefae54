"""Options of the commands that measure speed."""

import argparse
import dataclasses
import math

from moh_jax.cli import common, fields
from moh_jax.speed import options

# What is timed -> its text, and the class of its options.
OPS = {
  "attention": (
    "the core alone: outputs of heads from queries, keys, values",
    options.SequenceOptions,
  ),
  "layer": (
    "a whole layer with its router, and the same layer without one",
    options.LayerOptions,
  ),
  "decode": (
    "one new token against a cache of keys and values",
    options.DecodeOptions,
  ),
  "model": ("a whole model and its multi-head baseline", options.ModelOptions),
}
SHAPES = ("batch", "tokens", "heads", "active", "dtype", "causal", "rounds")


def bench(parser: argparse.ArgumentParser) -> None:
  """Time forms of attention, layers, decoding and models."""
  ops = parser.add_subparsers(
    dest="op",
    required=True,
    metavar="OP",
    help=", ".join((*OPS, "card", "input")),
  )
  for op, (text, cls) in OPS.items():
    sub = ops.add_parser(op, help=text, description=f"Time {text}.")
    if op == "model":
      which = sub.add_mutually_exclusive_group()
      fields.add_fields(which, cls, "model")
      common.add_config(which)
      which.add_argument(
        "--checkpoint", metavar="DIR", help=common.CHECKPOINT_HELP
      )
    else:
      sub.add_argument(
        "--target",
        metavar="NAME",
        default="",
        help="compile for a device that is not here and show what the compiler "
        "tells: h100, a100, v5e:2x2, v6e:2x2, ...",
      )
    names = {field.name for field in dataclasses.fields(cls)}
    fields.add_fields(sub, cls, *(names - {"model", "config"}))
    common.add_json(sub)
    sub.add_argument(
      "--plot",
      metavar="FILE",
      default="",
      help="plot the ratios; needs matplotlib (the extra moh_jax[plot])",
    )
    _add_traceback(sub)
  text = "all of these on this GPU or TPU, in minutes"
  sub = ops.add_parser("card", help=text, description=f"Time {text}.")
  sub.add_argument(
    "--out",
    required=True,
    metavar="DIR",
    help="folder of the results, made if needed; what is done there already is "
    "not measured again",
  )
  sub.add_argument(
    "--minutes",
    type=_minutes,
    default=8.0,
    help="begin no further stage after so many (default: 8)",
  )
  _add_traceback(sub)
  text = "every stage of a run's input, and its train step"
  sub = ops.add_parser("input", help=text, description=f"Time {text}.")
  common.add_config(sub, required=True)
  common.add_count(
    sub, "--batches", 20, help="to time the input with (default: 20)"
  )
  common.add_count(
    sub, "--steps", 10, help="to time the train step with (default: 10)"
  )
  sub.add_argument(
    "--pixels",
    action="store_true",
    help="of image files, time decoding alone, evaluation's transforms and "
    "training's instead",
  )
  common.add_json(sub)
  _add_traceback(sub)


def _add_traceback(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "--traceback", action="store_true", help="show the traceback of an error"
  )


def _minutes(text: str) -> float:
  try:
    minutes = float(text)
  except ValueError:
    minutes = math.nan
  if not 0 <= minutes < math.inf:
    raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
  return minutes


def tune_kernels(parser: argparse.ArgumentParser) -> None:
  """Measure the attention kernels' tiles on this GPU or TPU."""
  parser.add_argument(
    "--out",
    required=True,
    metavar="FILE",
    help="JSON file to add to; MOH_JAX_BLOCK_SIZES=FILE makes the library use "
    "it",
  )
  parser.add_argument(
    "--head-dim",
    type=fields.integer,
    nargs="+",
    default=[64, 128],
    help="head dims of the kernels' calls; on a TPU, layers with heads of 96 "
    "call them with 128",
  )
  fields.add_fields(parser, options.Workload, *SHAPES)
