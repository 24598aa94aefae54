"""`python -m moh_jax generate`."""

import argparse
import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from moh_jax.cli import chat, common, distributed, fields, interactive
from moh_jax.cli import options as options_lib
from moh_jax.config.llm import Sampling
from moh_jax.data.chat import chat_ids
from moh_jax.data.text_files import Prompts
from moh_jax.inference.generate import Generator, Prompt, complete_file
from moh_jax.inference.restore import load_checkpoint_tokenizer
from moh_jax.runtime import sharding


def run(args: argparse.Namespace) -> int:
  """Prints or writes the texts; a single one appears as it is written."""
  _check(args)
  lines = Prompts(args.prompt_file) if args.prompt_file else None
  given = {"top_k": args.sample_top_k, "stop": tuple(args.stop)}
  sampling = Sampling(**fields.given_fields(args, Sampling) | given)
  is_chat = chat.is_chat(args)
  messages = chat.conversations(args) if is_chat else []
  is_first = distributed.join(args)
  tokenizer = load_checkpoint_tokenizer(
    args.checkpoint, args.step, verify=args.verify
  )

  def prompt_of(turns: Sequence[str]) -> Prompt:
    if not is_chat:
      return turns[-1]
    talk = chat.conversation(args, turns)
    return chat_ids(tokenizer, talk, args.chat_template)

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
  if lines:
    options = {"settings": _settings(args, generator), "progress": True}
    before = complete_file(
      generator, lines, args.out, sampling, prompt_of=prompt_of, **options
    )
    if is_first:
      print(f"{len(lines):,} completions in {args.out}; {before:,} were there")
    return 0
  if not args.prompt and not args.messages:
    interactive.run(generator, sampling, prompt_of)
    return 0
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


def _check(args: argparse.Namespace) -> None:
  """Refuses options that do not go together, before anything is read."""
  if args.prompt_file and not args.out:
    raise ValueError("--prompt-file needs --out FILE")
  if args.out and not args.prompt_file:
    raise ValueError("--out is of --prompt-file; of --prompt, give --json FILE")
  if args.out:
    options_lib.out_file(args.out)
  if args.json and not (args.prompt or args.messages):
    raise ValueError("--json is of --prompt and --messages alone")
  if args.prompt or args.messages or args.prompt_file:
    return
  if args.distributed:
    raise ValueError(
      "--distributed needs --prompt, --messages or --prompt-file"
    )
  if not args.interactive and not sys.stdin.isatty():
    raise ValueError(
      "--prompt, --messages, --prompt-file or --interactive is missing; "
      "without them, prompts are read from a terminal"
    )


def _settings(args: argparse.Namespace, generator: Generator) -> dict[str, Any]:
  """What the texts depend on, beside prompts and sampling."""
  tokenizer = generator.tokenizer
  # With the files beside it, which say chat templates and ends of texts.
  files = repr((tokenizer.sha256, sorted(tokenizer.files.items())))
  return {
    "checkpoint": generator.fingerprint(),
    "ema": not args.no_ema,
    "routed_heads": args.top_k,  # "top_k" is that of the sampling
    "gate_form": args.gate_form,
    "dtype": generator.config.dtype,
    "cache_dtype": args.cache_dtype,
    "chat": args.chat,
    "system": args.system,
    "chat_template": args.chat_template,
    "no_bos": args.no_bos,
    "parse_special": args.parse_special,
    "tokenizer": hashlib.sha256(files.encode()).hexdigest(),
  }
