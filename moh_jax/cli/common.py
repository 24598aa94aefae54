"""Options, inputs and output that commands share; importable without JAX."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moh_jax.cli import distributed, fields, paths
from moh_jax.cli.overrides import PREFIX
from moh_jax.config import MeshConfig
from moh_jax.config.base import DTYPES, MOST_COUNT
from moh_jax.config.heads import GATE_FORMS
from moh_jax.config.registry import SPLITS
from moh_jax.runtime import run_lock, steps
from moh_jax.runtime.json_files import strict_json
from moh_jax.runtime.steps import load_config

if TYPE_CHECKING:
  from moh_jax.inference.restore import Restored
  from moh_jax.runtime.checkpoint import Metadata

CHECKPOINT_HELP = "workdir of `train` or output of `convert`"
_TOP_K_HELP = (
  "routed heads per token, one number for each layer (ViT: stage) or one for "
  "all, instead of the trained ones"
)


def add_json(parser: argparse.ArgumentParser) -> None:
  """Adds --json FILE."""
  parser.add_argument(
    "--json",
    metavar="FILE",
    default="",
    help="write the results as JSON to FILE; '-' prints one line to stdout",
  )


def add_config(parser: argparse._ActionsContainer, **options: Any) -> None:
  """Adds --config FILE[:ARG]; see `read_config`.

  Args:
    parser: of the command, or a group of its options.
    **options: of `add_argument`.
  """
  parser.add_argument(
    "--config",
    metavar="FILE[:ARG]",
    **{
      "help": "config file; --config.KEY=VALUE changes a key of it, and with "
      "--help all keys are listed"
    }
    | options,
  )


def add_count(
  parser: argparse.ArgumentParser,
  flag: str,
  default: int | None = None,
  **options: Any,
) -> None:
  """Adds an option that is a whole number of at least 1.

  Args:
    parser: of the command.
    flag: its name, such as "--batch-size".
    default: its value where it is not given.
    **options: of `add_argument`.
  """
  text = options.pop("help", "")
  if default and "default" not in text:
    text = f"{text} (default: {default})".strip()
  parser.add_argument(flag, type=_count, default=default, help=text, **options)


def _count(text: str) -> int:
  is_number = text.isascii() and text.isdecimal() and len(text) <= 10
  if not is_number or not 1 <= int(text) <= MOST_COUNT:
    raise argparse.ArgumentTypeError(
      f"{text[:30]} must be at least 1, a whole number, at most {MOST_COUNT}"
    )
  return int(text)


def add_step(parser: argparse.ArgumentParser) -> None:
  """Adds --step."""
  parser.add_argument(
    "--step", type=int, help="which checkpoint (default: the newest)"
  )
  parser.add_argument(
    "--newest-whole",
    action="store_true",
    help="use the newest checkpoint that is whole, where newer ones are "
    "damaged, in place of an error",
  )
  add_verify(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
  """Adds --no-verify."""
  parser.add_argument(
    "--no-verify",
    dest="verify",
    action="store_false",
    help="use a checkpoint without comparing it with its checksums, which "
    "takes the time of reading it",
  )


def add_weights(parser: argparse.ArgumentParser) -> None:
  """Adds the options of which stored parameters are read."""
  parser.add_argument(
    "--checkpoint", required=True, metavar="DIR", help=CHECKPOINT_HELP
  )
  add_step(parser)
  parser.add_argument(
    "--no-ema", action="store_true", help="use the raw parameters"
  )


def add_checkpoint(
  parser: argparse.ArgumentParser, several_top_k: str = ""
) -> None:
  """Adds the options of a model to restore and serve; see `restore`.

  Args:
    parser: of the command.
    several_top_k: what several --top-k do, where the command takes them.
  """
  add_weights(parser)
  parser.add_argument(
    "--top-k",
    type=fields.int_tuple,
    metavar="K,K,...",
    action="append" if several_top_k else "store",
    help=_TOP_K_HELP + several_top_k,
  )
  parser.add_argument(
    "--gate-form",
    choices=GATE_FORMS,
    help="form of the gates, instead of the trained one",
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, help="compute dtype, instead of the trained one"
  )
  parser.add_argument(
    "--no-compilation-cache",
    dest="compilation_cache",
    action="store_false",
    help="compile all programs anew; kept ones are in "
    "~/.cache/moh_jax/xla, or where MOH_JAX_COMPILATION_CACHE says",
  )


def add_mesh(parser: argparse.ArgumentParser) -> None:
  """Adds --mesh and --distributed."""
  parser.add_argument(
    "--mesh",
    type=mesh_config,
    default=MeshConfig(),
    metavar="AXIS=N,...",
    help="devices per axis, such as tensor=8 for a model too large for one; -1 "
    "takes those left (default: data=-1, the model on each)",
  )
  distributed.add_distributed(parser)


def add_image_folders(parser: argparse.ArgumentParser, note: str = "") -> None:
  """Adds --data, --split, --val-share and --label-column, of labelled images.

  Args:
    parser: of the command.
    note: what else the directory may be.
  """
  parser.add_argument(
    "--data",
    required=True,
    metavar="DIR",
    help="folder with a folder of images per class, or with train/ and val/ "
    f"that have those{note}",
  )
  parser.add_argument(
    "--split",
    choices=SPLITS,
    help="read this split alone; without train/ and val/, what the images are "
    "(default: train)",
  )
  parser.add_argument(
    "--val-share",
    type=fields.share,
    default=0.0,
    metavar="P",
    help="share of the images that becomes val/ where there is none, as "
    "data.val_share of a run (default: 0)",
  )
  parser.add_argument(
    "--label-column",
    metavar="NAME",
    default="",
    help="column of the labels of Parquet or Arrow files (default: found)",
  )


def read_inputs(args: argparse.Namespace, overrides: Sequence[str]) -> None:
  """Checks what a command reads as far as it goes without JAX.

  `args.config`, where the command has it, becomes the loaded config.

  Args:
    args: of the command.
    overrides: of the config's keys.

  Raises:
    FileNotFoundError: an input does not exist.
    ValueError: the config does not fit, or overrides lack one.
  """
  distributed.check_given(args)
  given = vars(args)
  paths.check_named(given)
  if given.get("config"):
    args.config = load_config(args.config, overrides)
  elif overrides:
    raise ValueError(f"{PREFIX}{overrides[0]} needs --config FILE[:ARG]")
  if given.get("checkpoint") and "://" not in args.checkpoint:
    steps.check_exists(args.checkpoint)
  # With several processes the first one, which may be quicker, has the lock.
  if given.get("workdir") and not given.get("distributed"):
    run_lock.check_free(args.workdir)
  if given.get("newest_whole"):
    if args.step is not None:
      raise ValueError(
        f"--newest-whole and --step={args.step} exclude each other"
      )
    args.step = steps.newest_whole_step(args.checkpoint)
  paths.check_there(given)


def mesh_config(text: str) -> MeshConfig:
  """Parses "fsdp=4,tensor=2"."""
  known = (*MeshConfig.AXES, "dcn_data")
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


def read_metadata(
  args: argparse.Namespace, command: str | None = None
) -> tuple[Metadata, int]:
  """Metadata and step of --checkpoint, read before its parameters.

  Args:
    args: of the command, with the options of `add_step`.
    command: its name, if it works with some families only.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: it is damaged, or the command does not work with its family.
  """
  from moh_jax.config import check_command
  from moh_jax.runtime import checkpoint

  metadata, step = checkpoint.read_metadata(
    args.checkpoint, args.step, verify=args.verify
  )
  if command is not None:
    check_command(metadata.config.model, command, args.checkpoint)
  return metadata, step


def restore(args: argparse.Namespace, **options: Any) -> Restored:
  """Restores the model that `add_checkpoint` parsed the options of.

  Args:
    args: of the command.
    **options: of `moh_jax.restore`, instead of the parsed ones or beside them.
  """
  from moh_jax.inference import restore as library

  router = {
    "gate_form": args.gate_form,
    "top_p": vars(args).get("head_top_p"),
  }
  parsed = {
    "step": args.step,
    "use_ema": not args.no_ema,
    "top_k": args.top_k,
    "router": {n: value for n, value in router.items() if value} or None,
    "dtype": args.dtype,
    "verify": args.verify,
  }
  return library.restore(args.checkpoint, **parsed | options)


def write_json(target: str, value: Any) -> None:
  """Writes results where --json asked for them.

  Args:
    target: a file, "-" for one line on stdout, or "" for nowhere.
    value: anything JSON can hold; numbers that it cannot, such as NaN, become
      null.
  """
  if target == "-":
    print(strict_json(value), file=sys.stdout, flush=True)
  elif target:
    pathlib.Path(target).write_text(strict_json(value, indent=2) + "\n")


def report(target: str, metrics: Mapping[str, Any]) -> None:
  """Prints a line per metric that there is, and writes all to `target`.

  Args:
    target: as for `write_json`; "-" prints nothing else.
    metrics: name -> value, None where there is none.
  """
  if target != "-":
    for name, value in metrics.items():
      if value is not None:
        text = f"{value:.4f}" if isinstance(value, float) else value
        print(f"{name}: {text}")
  write_json(target, metrics)


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
  """Aligns rows under a header, as text."""
  cells = [[str(cell) for cell in row] for row in (header, *rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
  lines = [
    "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    for row in cells
  ]
  return "\n".join(lines)
