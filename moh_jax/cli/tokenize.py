"""`python -m moh_jax tokenize`."""

import argparse
import os
import pathlib

from moh_jax.data.text.tokenize import PIECE_BYTES, held_out_parts, tokenize
from moh_jax.data.text.tokenizers import load_tokenizer

INPUT_HELP = (
  "text files or quoted patterns with *, ? and **, each also .gz or .zst: "
  ".jsonl, .ndjson and .json hold one JSON object a line, .parquet a table, "
  "any other file is one document"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "--input", required=True, nargs="+", metavar="GLOB", help=INPUT_HELP
  )
  parser.add_argument(
    "--tokenizer",
    required=True,
    metavar="FILE",
    help="a tokenizer.json, a SentencePiece .model, a folder with one of them, "
    "or 'bytes'",
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--field",
    default="text",
    help="field of JSON objects and tables that is the text (default: text)",
  )
  parts = parser.add_mutually_exclusive_group()
  parts.add_argument(
    "--held-out",
    type=float,
    default=0.005,
    metavar="SHARE",
    help="share of the documents in val/, chosen by a hash of file and line; "
    "the others are train/ (default: 0.005)",
  )
  parts.add_argument(
    "--split", metavar="NAME", help="put all documents into this split instead"
  )
  parser.add_argument(
    "--shard-bytes",
    type=int,
    default=PIECE_BYTES,
    metavar="N",
    help=f"input of a shard in bytes, about (default: {PIECE_BYTES})",
  )
  parser.add_argument(
    "--workers",
    type=int,
    default=os.cpu_count(),
    metavar="N",
    help="processes (default: one per core)",
  )


def run(args: argparse.Namespace) -> int:
  """Writes the token sets; a second run continues the first."""
  tokenizer = load_tokenizer(args.tokenizer)
  options = {
    "field": args.field,
    "piece_bytes": args.shard_bytes,
    "workers": args.workers,
  }
  parts = {args.split: None} if args.split else held_out_parts(args.held_out)
  done = tokenize(args.input, tokenizer, args.out, parts, **options)
  for split, metadata in done.items():
    folder = pathlib.Path(args.out) / split
    text = (
      f"{split}: {metadata['documents']:,} documents, "
      f"{metadata['tokens']:,} tokens of {metadata['text_bytes']:,} bytes of "
      f"text in {folder}"
    )
    if metadata["skipped"]:
      text += f"; {metadata['skipped']:,} skipped, see {folder}/skipped.txt"
    print(text)
  return 0
