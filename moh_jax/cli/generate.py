"""`python -m moh_jax generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from moh_jax.cli import command
from moh_jax.config.base import Amount, Count, Range
from moh_jax.runtime.alive import alive
from moh_jax.runtime.files import read_json

if TYPE_CHECKING:
  from moh_jax.config.llm import Sampling
  from moh_jax.inference.generate import Generator, Prompt

_SEEDS = 2**32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Checkpoint, command.Distributed, command.Output):
  """Write on from prompts with a language model.

  Attributes:
    prompt: text to write on from; several times for several texts.
    messages: conversation to answer: a JSON list of objects with 'role' and
      'content'.
    tools: what the model may call in --messages or --chat: a JSON list of
      schemas.
    prompt_file: JSON lines such as {"prompt": "TEXT"}; needs --out.
    interactive: read prompts from the terminal, one a line; the default there.
    out: of --prompt-file: JSON lines in the same order; a second run continues
      the first.
    chat: each prompt is a user's message, and the model's chat template makes
      the text from it (the extra moh_jax[llm]).
    system: first message of each --chat.
    max_new_tokens: tokens written at most.
    temperature: of the distribution; 0 always takes the best token.
    top_p: sample from the fewest best tokens that have this probability.
    seed: of the samples; those of prompt i do not depend on the other prompts.
    stop: text that ends what is written; several times for several texts.
  """

  prompt: tuple[str, ...] = command.option("repeated", "TEXT", default=())
  messages: command.InPath | None = None
  tools: command.InPath | None = None
  prompt_file: command.InPath | None = None
  interactive: bool = False
  out: command.OutFile | None = None
  chat: bool = False
  system: str | None = command.option(metavar="TEXT", default=None)
  max_new_tokens: Count = 64
  temperature: Amount = 0.0
  top_p: Annotated[float, Range(0, 1, "(]")] = 1.0
  seed: Annotated[int, Range(0, _SEEDS - 1, "[]")] = 0
  stop: tuple[str, ...] = command.option("repeated", "TEXT", default=())

  def check(self) -> None:
    """Prompts come from one place, and its options are given with it."""
    super().check()
    given = {
      "--prompt": self.prompt,
      "--messages": self.messages,
      "--prompt-file": self.prompt_file,
      "--interactive": self.interactive,
    }
    sources = [name for name, value in given.items() if value]
    if len(sources) > 1:
      raise ValueError(f"{sources[1]} must not be given with {sources[0]}")
    if not sources and not sys.stdin.isatty():
      raise ValueError(
        f"one of {', '.join(given)} is missing; without them, prompts are read "
        "from a terminal"
      )
    if bool(self.prompt_file) != bool(self.out):
      raise ValueError("--prompt-file and --out must be given together")
    for name in ("json", "distributed"):
      self.need(name, sources and not self.interactive, "needs prompts")
    self.need("system", self.chat and not self.messages, "needs --chat alone")
    is_chat = self.chat or self.messages
    self.need("tools", is_chat, "needs --chat or --messages")
    self.need("top_p", self.temperature, "needs --temperature above 0")

  def conversation(self, turns: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a conversation.

    Args:
      turns: texts of the user and of the model in turns.
    """
    roles = itertools.cycle(("user", "assistant"))
    said = list(zip(roles, turns))
    if self.system is not None:
      said.insert(0, ("system", self.system))
    return [{"role": role, "content": text} for role, text in said]


def run(options: Options) -> int:
  """Prints or writes the texts; a single one appears as it is written."""
  from moh_jax.config.llm import Sampling
  from moh_jax.data.chat import chat_ids
  from moh_jax.data.files import read_prompts
  from moh_jax.inference.generate import Generator, complete_file
  from moh_jax.inference.restore import load_checkpoint_tokenizer
  from moh_jax.runtime.devices import random_settings
  from moh_jax.runtime.mesh import make_mesh, use_mesh

  lines = read_prompts(options.prompt_file) if options.prompt_file else []
  asked: list[dict[str, Any]] = [{"prompt": text} for text in options.prompt]
  if options.messages:
    asked = [{"messages": read_json(options.messages, list[dict])}]
  elif options.chat:
    asked = [{"messages": options.conversation([t])} for t in options.prompt]
  tools = options.tools and (read_json(options.tools, list[dict]) or None)
  options.join()
  metadata, step = options.stored("generate")
  tokenizer = load_checkpoint_tokenizer(options.checkpoint, step)

  def prompt_of(turns: Sequence[str]) -> Prompt:
    if not options.chat:
      return turns[-1]
    return chat_ids(tokenizer, options.conversation(turns), tools=tools)

  prompts = [
    chat_ids(tokenizer, one["messages"], tools=tools)
    if "messages" in one
    else one["prompt"]
    for one in asked
  ]
  names = "max_new_tokens", "temperature", "top_p", "stop", "seed"
  sampling = Sampling(**{name: getattr(options, name) for name in names})
  mesh = make_mesh(metadata.config.mesh)
  with use_mesh(mesh), alive("loading the model"):
    restored = options.restore(mesh=mesh)
  generator = Generator(restored, tokenizer, mesh=mesh)
  del restored  # the generator has its own copy of the parameters
  if lines:
    settings = {
      "model": generator.fingerprint(),
      "tokenizer": tokenizer.sha256,
      "tools": tools,
      **{name: getattr(options, name) for name in ("chat", "system")},
      **random_settings(),
    }
    before = complete_file(
      *(generator, lines, options.out, sampling),
      settings=settings,
      prompt_of=prompt_of,
    )
    told = f"{len(lines):,} completions in {options.out}"
    values = {"prompts": len(lines), "out": options.out}
    options.give(values, [f"{told}; {before:,} were there"])
  elif not prompts:
    _interact(generator, sampling, prompt_of)
  elif len(prompts) == 1 and not options.json:
    pieces = generator.stream(prompts[0], sampling)
    with alive("compiling, then reading the prompt"):
      first = next(pieces, "")  # a bad prompt is an error before any output
    shown = asked[0].get("prompt", "")
    for piece in itertools.chain([shown, first], pieces, ["\n"]):
      if options.is_first():
        _print(piece)
  else:
    with alive("compiling and generating"):
      made = list(zip(asked, generator.generate(prompts, sampling)))
    more = {"tools": tools} if tools else {}
    rows = [one | more | dataclasses.asdict(found) for one, found in made]
    told = [
      f"{one.get('prompt', '')}{found.text}\n[{found.finish_reason}]\n"
      for one, found in made
    ]
    options.give({"completions": rows, "step": step}, told)
  return 0


_print = functools.partial(print, end="", flush=True)


def _interact(
  generator: Generator,
  sampling: Sampling,
  prompt_of: Callable[[Sequence[str]], Prompt],
) -> None:
  """Reads lines and writes on from each, until the end of the input (Ctrl-D).

  Ctrl-C ends one answer. Line i is sampled with the seed plus i, so that a line
  that is asked again may get another answer. Programs stay compiled.

  Args:
    generator: the model.
    sampling: how tokens are sampled.
    prompt_of: from the lines and answers so far, in turns, to the prompt.
  """
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401  gives `input` editing and a history
  prompt = "> " * sys.stdin.isatty()
  if prompt:
    print("A line is a prompt. Ctrl-C ends an answer, Ctrl-D all.")
  asked, turns = 0, []
  while True:
    try:
      line = input(prompt)
      if not line:
        continue
      seed = (sampling.seed + asked) % _SEEDS
      asked, answer = asked + 1, ""
      turns += [line, ""]
      for piece in generator.stream(
        prompt_of(turns[:-1]), dataclasses.replace(sampling, seed=seed)
      ):
        answer += piece
        turns[-1] = answer
        _print(piece)
    except EOFError:
      print()
      return
    except ValueError as error:  # such as a prompt that is too long
      print(f"error: {error}", end="")
      turns.clear()  # or a conversation that became too long could not end
    except KeyboardInterrupt:
      pass
    print()
