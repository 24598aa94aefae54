"""`python -m moh_jax tokenize`."""

import argparse
import pathlib

from moh_jax.data.shard_writer import describe_skipped
from moh_jax.data.tokenize import held_out_parts, tokenize
from moh_jax.data.tokenizers import load_tokenizer


def run(args: argparse.Namespace) -> int:
  """Writes the token sets; a second run continues the first."""
  tokenizer = load_tokenizer(args.tokenizer)
  options = {
    "field": args.field,
    "piece_bytes": args.shard_bytes,
    "workers": args.workers,
    "on_error": args.on_error,
  }
  parts = {args.split: None} if args.split else held_out_parts(args.held_out)
  done = tokenize(args.data, tokenizer, args.out, parts, **options)
  for split, metadata in done.items():
    folder = pathlib.Path(args.out) / split
    text = (
      f"{split}: {metadata['documents']:,} documents, "
      f"{metadata['tokens']:,} tokens of {metadata['text_bytes']:,} bytes of "
      f"text in {folder}"
    )
    if skipped := describe_skipped(metadata["shards"]):
      text += f"; {skipped}, see {folder}/skipped"
    print(text)
  return 0
