"""Options of the commands for models of every family."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.config import EvalConfig, export_forms, public_formats
from moh_jax.convert.tensor_files import DTYPES, SHARD_SIZE

_UNITS = {"GB": 10**9, "MB": 10**6}


def convert(parser: argparse.ArgumentParser) -> None:
  """Turn a public checkpoint into one of ours."""
  parser.add_argument(
    "--from",
    dest="format",
    required=True,
    choices=public_formats(),
    metavar="FORMAT",
    help=f"one of {', '.join(public_formats())}",
  )
  parser.add_argument(
    "--source",
    required=True,
    metavar="PATH",
    help="safetensors file or folder, or .pth/.pt; a folder of transformers "
    "says in its config.json which model it is, a file of `export` in its "
    "metadata",
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--key", help="entry of a .pth that holds the weights (default: found)"
  )
  which = parser.add_mutually_exclusive_group()
  which.add_argument(
    "--model",
    help="released model (default: the one that the source names, or the one "
    "whose shapes fit)",
  )
  common.add_config(which, help="config file of another model")
  parser.add_argument(
    "--image-size",
    type=fields.integer,
    help="input size of a classifier in pixels, instead of the model's; the "
    "relative coordinates keep the pre-training size",
  )


def evaluate(parser: argparse.ArgumentParser) -> None:
  """Score a checkpoint on its held-out data."""
  common.add_checkpoint(parser, "; given several times, a row for each")
  parser.add_argument(
    "--head-top-p",
    type=float,
    metavar="P",
    help="every token selects its best routed heads until their scores add up "
    "to P, in place of a fixed number; activated_share is what they use",
  )
  common.add_mesh(parser)
  parser.add_argument(
    "--data",
    metavar="DIR",
    help="directory of images, shards, latents or tokens, instead of the "
    "run's; its val/, or all images of a folder without",
  )
  parser.add_argument(
    "--per-class",
    metavar="FILE",
    default="",
    help="write a CSV file with the scores of each class, and what it is taken "
    "for most often; the worst classes are printed",
  )
  parser.add_argument(
    "--labels",
    dest="labels_file",
    metavar="FILE",
    help="JSON file of the right classes: a list in the order of the file "
    "names (such as ReaL's), or entries by file name; an entry is a class or "
    "several",
  )
  parser.add_argument(
    "--plot",
    metavar="FILE",
    default="",
    help="draw the scores of several --top-k over the activated share and over "
    "time (.png or .svg)",
  )
  fields.add_fields(parser, EvalConfig, "batch_size", defaults="the run's")
  fields.add_fields(parser, EvalConfig, "examples", defaults="all")
  common.add_json(parser)


def export(parser: argparse.ArgumentParser) -> None:
  """Turn a checkpoint into public tensor names."""
  common.add_weights(parser)
  parser.add_argument(
    "--out",
    required=True,
    metavar="PATH",
    help="safetensors file to write; for a language model, and with --to, a "
    "folder, new or empty",
  )
  parser.add_argument(
    "--to",
    choices=export_forms(),
    help="form of the folder. Of a language model: hf (default) is what "
    "transformers loads, with our code where it has none for the model; "
    "released is what the modeling file of the MoH-LLaMA3 release runs. Of a "
    "plain DiT: diffusers is what DiTTransformer2DModel loads",
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default="float32", help="of the stored weights"
  )
  parser.add_argument(
    "--shard-size",
    type=_bytes,
    default=SHARD_SIZE,
    metavar="SIZE",
    help="largest file of a folder, as 5GB or 500MB (default: 5GB)",
  )
  parser.add_argument(
    "--license",
    default="",
    metavar="NAME",
    help="licence that the model card states, such as apache-2.0",
  )
  parser.add_argument(
    "--scores",
    default="",
    metavar="FILE.json",
    help="scores for the model card, as `evaluate --json` writes them",
  )


def _bytes(text: str) -> int:
  """Parses "5GB"."""
  number, unit = text[:-2], text[-2:].upper()
  if unit not in _UNITS or not number.isdigit() or not int(number):
    raise argparse.ArgumentTypeError(
      f"{text!r} must be a whole number and one of {', '.join(_UNITS)}"
    )
  return int(number) * _UNITS[unit]
