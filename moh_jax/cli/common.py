"""Arguments and output that commands share."""

import argparse
import ast
import dataclasses
import inspect
import json
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections

from moh_jax import config as config_lib
from moh_jax.cli.processes import join_processes
from moh_jax.config import Config, MeshConfig
from moh_jax.config.heads import GATE_FORMS
from moh_jax.data.infer import resolve

_TOP_K_HELP = (
  "routed heads per token in each stage (DiT: layer), instead of the trained "
  "ones"
)


def add_json(parser: argparse.ArgumentParser) -> None:
  """Adds --json FILE."""
  parser.add_argument(
    "--json",
    metavar="FILE",
    default="",
    help="write the figures as JSON to FILE; '-' prints one line to stdout",
  )


def add_step(parser: argparse.ArgumentParser) -> None:
  """Adds --step."""
  parser.add_argument(
    "--step", type=int, help="which checkpoint (default: the newest)"
  )


def add_no_ema(parser: argparse.ArgumentParser) -> None:
  """Adds --no-ema."""
  parser.add_argument(
    "--no-ema", action="store_true", help="use the raw parameters"
  )


def add_checkpoint(
  parser: argparse.ArgumentParser, top_k: str = _TOP_K_HELP
) -> None:
  """Adds the options of what is restored: which parameters, which router.

  Args:
    parser: of the command.
    top_k: help of --top-k, where a command reads it in its own way.
  """
  parser.add_argument(
    "--checkpoint",
    required=True,
    metavar="DIR",
    help="workdir of train.py or output of `convert`",
  )
  add_step(parser)
  add_no_ema(parser)
  parser.add_argument("--top-k", type=int_tuple, metavar="K,K,...", help=top_k)
  parser.add_argument(
    "--gate-form",
    choices=GATE_FORMS,
    help="form of the gates, instead of the trained one",
  )


def add_mesh(parser: argparse.ArgumentParser) -> None:
  """Adds --mesh and --distributed; see `join`."""
  parser.add_argument(
    "--mesh",
    type=mesh_config,
    default=MeshConfig(),
    metavar="AXIS=N,...",
    help="devices per axis, such as tensor=8 for a model too large for one; -1 "
    "takes those left (default: data=-1, the model on each)",
  )
  parser.add_argument(
    "--distributed",
    action="store_true",
    help="join the run's other processes first, as train.py does; the first "
    "one prints",
  )


def join(args: argparse.Namespace) -> bool:
  """Joins the run's other processes if --distributed asks for it.

  JAX allows it only before its first use.

  Returns:
    Whether this is the first process, which prints and writes the figures.

  Raises:
    ValueError: there are none that JAX finds.
  """
  if args.distributed:
    join_processes()
  return jax.process_index() == 0


def mesh_config(text: str) -> MeshConfig:
  """Parses "fsdp=4,tensor=2"."""
  known = [field.name for field in dataclasses.fields(MeshConfig)]
  sizes = {}
  for part in text.split(","):
    name, _, size = part.partition("=")
    if name not in known or not size.lstrip("-").isdigit():
      raise argparse.ArgumentTypeError(
        f"{text!r} must be AXIS=N,... with axes {', '.join(known)}"
      )
    sizes[name] = int(size)
  if -1 in sizes.values():
    sizes.setdefault("data", 1)  # in place of its own -1
  try:
    return MeshConfig(**sizes)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def restore_options(args: argparse.Namespace) -> dict[str, Any]:
  """What `add_checkpoint` parsed, as options of `restore`."""
  return {
    "step": args.step,
    "use_ema": not args.no_ema,
    "top_k": args.top_k,
    "router": {"gate_form": args.gate_form} if args.gate_form else None,
  }


def int_tuple(text: str) -> tuple[int, ...]:
  """Parses "0,0,6,12"."""
  return _parts(text, int, "integers")


def percent_tuple(text: str) -> tuple[float, ...]:
  """Parses "50,62.5"."""
  return _parts(text, float, "percentages")


def _parts(text: str, kind: type, what: str) -> tuple:
  try:
    return tuple(kind(part) for part in text.split(","))
  except ValueError as error:
    raise argparse.ArgumentTypeError(
      f"{text!r} must be {what} separated by commas"
    ) from error


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
  """Loads a config file, "FILE[:ARG]", with "a.b=value" overrides.

  What the config leaves unset is filled in, see `data.infer.resolve`.

  Raises:
    FileNotFoundError: there is no such file, or no data to look at.
    ValueError: the file, an override or a value does not fit.
  """
  name, _, argument = spec.partition(":")
  path = pathlib.Path(name)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such config file")
  if path.suffix != ".py":
    raise ValueError(f"{path}: a config file is Python and ends in .py")
  get_config = runpy.run_path(str(path)).get("get_config")
  if get_config is None:
    raise ValueError(f"{path}: has no function get_config")
  if argument and not inspect.signature(get_config).parameters:
    raise ValueError(f"{path}: takes no argument, {argument!r} was given")
  cfg = get_config(argument) if argument else get_config()
  if not isinstance(cfg, ml_collections.ConfigDict):
    raise ValueError(
      f"{path}: get_config returned {type(cfg).__name__}, not a ConfigDict"
    )
  for override in overrides:
    key, equals, text = override.partition("=")
    if not equals:
      raise ValueError(f"override {override!r} must be FIELD=VALUE")
    try:
      value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      value = text
    try:
      with cfg.ignore_type():
        cfg.update_from_flattened_dict({key: value})
    except KeyError as error:
      raise ValueError(config_lib.unknown_key(key)) from error
  return resolve(config_lib.from_config_dict(cfg))


def write_json(target: str, value: Any) -> None:
  """Writes figures where --json asked for them.

  Args:
    target: a file, "-" for one line on stdout, or "" for nowhere.
    value: anything JSON can hold.
  """
  if target == "-":
    print(json.dumps(value), file=sys.stdout, flush=True)
  elif target:
    pathlib.Path(target).write_text(json.dumps(value, indent=2) + "\n")


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
  """Aligns rows under a header, as text."""
  cells = [[str(cell) for cell in row] for row in (header, *rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
  lines = [
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for row in cells
  ]
  return "\n".join(lines)
