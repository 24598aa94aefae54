"""`python -m moh_jax convert`."""

import argparse

from moh_jax.config import family_of_format, imported
from moh_jax.convert.checkpoints import convert
from moh_jax.data.chat import template_names
from moh_jax.data.infer import resolve
from moh_jax.data.tokenizers import Tokenizer, TokenizerFileError
from moh_jax.inference.restore import load_checkpoint_tokenizer


def run(args: argparse.Namespace) -> int:
  """Writes the converted checkpoint, and says what was taken."""
  name, count = convert(
    args.format,
    args.source,
    args.out,
    key=args.key,
    model=args.model,
    config=resolve(args.config) if args.config else None,
    image_size=args.image_size,
  )
  print(f"{name}: {count:,} parameters written to {args.out}")
  if imported(family_of_format(args.format).model).READS_TEXT:
    try:
      print(_describe(load_checkpoint_tokenizer(args.out)))
    except (FileNotFoundError, TokenizerFileError):
      print("tokenizer: none that can be read")
  return 0


def _describe(tokenizer: Tokenizer) -> str:
  """How texts begin and end, and how conversations are written."""

  def named(token: int) -> str:
    return f"{tokenizer.id_to_token(token)} ({token})"

  begin = "texts begin without"
  if tokenizer.add_bos:
    begin = f"texts begin with {named(tokenizer.bos_id)}"
  stops = ", ".join(map(named, tokenizer.stop_ids)) or "no token"
  templates = ", ".join(template_names(tokenizer)) or "none"
  return (
    f"tokenizer: {tokenizer.file_name}, {tokenizer.vocab_size:,} ids; {begin}; "
    f"generated texts stop at {stops}; chat templates: {templates}"
  )
