"""`python -m moh_jax tokenize`."""

import argparse
import pathlib
from typing import Any

from moh_jax.data.shard_writer import describe_skipped
from moh_jax.data.tokenize import tokenize
from moh_jax.data.tokenizers import load_tokenizer


def run(args: argparse.Namespace) -> int:
  """Writes the token sets; a second run continues the first."""
  tokenizer = load_tokenizer(args.tokenizer)
  options: dict[str, Any] = {
    "field": args.field,
    "piece_bytes": args.shard_bytes,
    "workers": args.workers,
    "on_error": args.on_error,
  }
  part = {"split": args.split} if args.split else {"held_out": args.held_out}
  done = tokenize(args.data, tokenizer, args.out, **options, **part)
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
