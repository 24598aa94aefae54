"""`python -m moh_jax generate`."""

import argparse
import dataclasses
import itertools

from moh_jax.cli import common, fields
from moh_jax.inference.generate import Generator
from moh_jax.inference.options import Sampling
from moh_jax.inference.text_checkpoint import load_checkpoint_tokenizer
from moh_jax.runtime import sharding


def run(args: argparse.Namespace) -> int:
  """Prints the texts; a single one appears as it is written."""
  given = {"top_k": args.sample_top_k, "stop": tuple(args.stop)}
  sampling = Sampling(**fields.given_fields(args, Sampling) | given)
  is_first = common.join(args)
  tokenizer = load_checkpoint_tokenizer(args.checkpoint)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh)
  generator = Generator(
    restored,
    tokenizer,
    mesh=mesh,
    cache_dtype=args.cache_dtype,
    batch_size=args.batch_size,
  )
  step = restored.step
  del restored  # the generator has its own copy of the parameters
  if len(args.prompt) == 1 and not args.json:
    pieces = generator.stream(args.prompt[0], sampling)
    first = next(pieces, "")  # a bad prompt is an error before any output
    for piece in itertools.chain([args.prompt[0], first], pieces, ["\n"]):
      if is_first:
        print(piece, end="", flush=True)
    return 0
  completions = generator.generate(args.prompt, sampling)
  if not is_first:
    return 0
  if args.json != "-":
    for prompt, completion in zip(args.prompt, completions):
      print(f"{prompt}{completion.text}\n[{completion.finish_reason}]\n")
  rows = [
    {"prompt": prompt, **dataclasses.asdict(completion)}
    for prompt, completion in zip(args.prompt, completions)
  ]
  common.write_json(args.json, {"completions": rows, "step": step})
  return 0
