"""Options of `python -m moh_jax bench`.

What is not given has no attribute: the defaults are those of the option classes
in `moh_jax.speed`, which need JAX; the help states them.
"""

import argparse
import dataclasses
from collections.abc import Callable

from moh_jax.cli import common
from moh_jax.config import CACHE_DTYPES
from moh_jax.config.checks import DTYPES, IMPLEMENTATIONS

OPS = {
  "attention": "the core alone: outputs of heads from queries, keys, values",
  "layer": "a whole layer with its router, and the same layer without one",
  "decode": "one new token against a cache of keys and values",
  "model": "a whole model and its multi-head baseline",
}
MODES = ("forward", "forward_backward", "causal", "causal_forward_backward")


@dataclasses.dataclass(frozen=True)
class HeadDefaults:
  """Defaults of a comparison of heads, as its help states them."""

  lengths: tuple[int, ...] = (256, 512, 1024)
  shares: tuple[float, ...] = (50, 75)
  modes: tuple[str, ...] = ("forward", "forward_backward", "causal")
  heads: int = 32
  head_dim: int = 64
  batch: int = 1
  known_implementations: tuple[str, ...] = IMPLEMENTATIONS


DEFAULTS = {
  "attention": HeadDefaults(),
  "layer": HeadDefaults(),
  "decode": HeadDefaults(
    lengths=(1024, 4096), modes=(), known_implementations=("dense", "kernel")
  ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  ops = parser.add_subparsers(
    dest="op", required=True, metavar="OP", help=", ".join(OPS)
  )
  for op, text in OPS.items():
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


def _add_heads(parser: argparse.ArgumentParser, op: str) -> None:
  defaults = DEFAULTS[op]
  unit = "slots of the cache" if op == "decode" else "tokens of a sequence"
  _add_list(parser, "lengths", common.int_tuple, "N", unit, defaults.lengths)
  _add_list(
    parser,
    "shares",
    common.percent_tuple,
    "P",
    "percent of the heads that are active",
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
  if defaults.modes:
    modes = f"of {', '.join(MODES)}"
    _add_list(parser, "modes", _names, "MODE", modes, defaults.modes)
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
      choices=CACHE_DTYPES,
      help="(default: the compute dtype)",
    )
  parser.add_argument("--batch", type=int, help=f"(default: {defaults.batch})")


def _add_model(parser: argparse.ArgumentParser) -> None:
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--model", help="released name (default: moh-vit-s80)")
  common.add_config(which)
  which.add_argument("--checkpoint", metavar="DIR", help=common.CHECKPOINT_HELP)
  _add_list(
    parser,
    "lengths",
    common.int_tuple,
    "N",
    "tokens of a text (default: the config's; of a released model 512)",
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
    "--dtype",
    choices=DTYPES,
    help="(default: float32; of `model` the config's)",
  )
  parser.add_argument("--rounds", type=int, help="measured turns (default: 7)")
  common.add_json(parser)
  parser.add_argument(
    "--plot",
    metavar="FILE",
    default="",
    help="plot the ratios; needs matplotlib (the extra moh_jax[plot])",
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
