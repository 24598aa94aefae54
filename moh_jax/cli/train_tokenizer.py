"""`python -m moh_jax train-tokenizer`."""

import argparse

from moh_jax.cli import common
from moh_jax.data.text.pieces import list_pieces
from moh_jax.data.text.tokenize import PIECE_BYTES
from moh_jax.data.text.tokenizers import tokenizer_from_bytes, train_bpe
from moh_jax.files import replacing


def run(args: argparse.Namespace) -> int:
  """Trains a byte-level BPE and writes it."""
  out = common.out_file(args.out, ".json")
  groups = list_pieces(args.data, PIECE_BYTES)
  content = train_bpe(common.read_texts(groups, args.field), args.vocab_size)
  with replacing(out) as path:
    path.write_bytes(content)
  entries = tokenizer_from_bytes("tokenizer_json", content).vocab_size
  print(f"{out}: {entries:,} entries")
  if entries < args.vocab_size:
    print(
      f"the text has no more; --vocab-size={args.vocab_size} is not reached"
    )
  return 0
