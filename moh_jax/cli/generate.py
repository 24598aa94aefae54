"""`python -m moh_jax generate`."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence

from moh_jax.cli import chat, common, fields
from moh_jax.data.text.chat_template import chat_ids
from moh_jax.inference.generate import Generator, Prompt
from moh_jax.inference.options import Sampling
from moh_jax.inference.text_checkpoint import load_checkpoint_tokenizer
from moh_jax.runtime import sharding


def run(args: argparse.Namespace) -> int:
  """Prints the texts; a single one appears as it is written."""
  given = {"top_k": args.sample_top_k, "stop": tuple(args.stop)}
  sampling = Sampling(**fields.given_fields(args, Sampling) | given)
  is_chat = chat.is_chat(args)
  messages = chat.conversations(args) if is_chat else []
  is_first = common.join(args)
  tokenizer = load_checkpoint_tokenizer(args.checkpoint)
  prompts: Sequence[Prompt] = args.prompt
  shown = args.prompt  # what stands before a completion
  if is_chat:
    prompts = [chat_ids(tokenizer, m, args.chat_template) for m in messages]
    shown = [""] * len(messages)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh)
  generator = Generator(
    restored,
    tokenizer,
    mesh=mesh,
    cache_dtype=args.cache_dtype,
    batch_size=args.batch_size,
    add_bos=False if args.no_bos else None,
    parse_special=args.parse_special,
  )
  step = restored.step
  del restored  # the generator has its own copy of the parameters
  if len(prompts) == 1 and not args.json:
    pieces = generator.stream(prompts[0], sampling)
    first = next(pieces, "")  # a bad prompt is an error before any output
    for piece in itertools.chain([shown[0], first], pieces, ["\n"]):
      if is_first:
        print(piece, end="", flush=True)
    return 0
  completions = generator.generate(prompts, sampling)
  if not is_first:
    return 0
  if args.json != "-":
    for before, completion in zip(shown, completions):
      print(f"{before}{completion.text}\n[{completion.finish_reason}]\n")
  asked = [
    {"messages": messages[i]} if is_chat else {"prompt": prompt}
    for i, prompt in enumerate(prompts)
  ]
  rows = [
    {**question, **dataclasses.asdict(completion)}
    for question, completion in zip(asked, completions)
  ]
  common.write_json(args.json, {"completions": rows, "step": step})
  return 0
