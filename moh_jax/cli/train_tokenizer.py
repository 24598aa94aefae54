"""`python -m moh_jax train-tokenizer`."""

import argparse
import collections

from moh_jax.cli import common, text_files
from moh_jax.data.shard_writer import describe_skipped
from moh_jax.data.text_files import PIECE_BYTES, count_or_stop, list_pieces
from moh_jax.data.tokenizers import tokenizer_from_bytes, train_bpe
from moh_jax.runtime.files import replacing


def run(args: argparse.Namespace) -> int:
  """Trains a byte-level BPE and writes it."""
  out = common.out_file(args.out, ".json")
  groups = list_pieces(args.data, PIECE_BYTES)
  skipped: collections.Counter[str] = collections.Counter()
  on_bad = count_or_stop(args.on_error, skipped)
  texts = text_files.read_texts(groups, args.field, on_bad)
  content = train_bpe(texts, args.vocab_size)
  with replacing(out) as path:
    path.write_bytes(content)
  entries = tokenizer_from_bytes("tokenizer_json", content).vocab_size
  told = describe_skipped([{"skipped": skipped}])
  print(f"{out}: {entries:,} entries" + (f"; {told}" if told else ""))
  if entries < args.vocab_size:
    print(
      f"the text has no more; --vocab-size={args.vocab_size} is not reached"
    )
  return 0
