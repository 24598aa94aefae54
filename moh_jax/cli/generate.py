"""`python -m moh_jax generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from moh_jax.cli import command
from moh_jax.config.base import Amount, Count, Natural, Range, is_utf8
from moh_jax.config.llm import Sampling
from moh_jax.runtime.files import printable
from moh_jax.runtime.json_files import read_json

if TYPE_CHECKING:
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
    chat_template: where the model has several (default: default).
    no_bos: prompts do not begin with the begin of text, whatever the tokenizer
      says.
    parse_special: names of special tokens in a prompt are these tokens, not
      text.
    max_new_tokens: tokens written at most.
    temperature: of the distribution; 0 always takes the best token.
    top_p: sample from the fewest best tokens that have this probability.
    sample_top_k: sample from so many best tokens (--top-k is of the heads); 0:
      from all.
    seed: of the samples; those of prompt i do not depend on the other prompts.
    stop: text that ends what is written; several times for several texts.
    batch_size: texts at a time.
    cache_dtype: of keys and values; without it the compute dtype, on a CPU
      float32.
  """

  prompt: tuple[str, ...] = command.option("repeated", "TEXT", default=())
  messages: command.InPath | None = None
  tools: command.InPath | None = None
  prompt_file: command.InPath | None = None
  interactive: bool = False
  out: command.OutFile | None = None
  chat: bool = False
  system: str | None = command.option(metavar="TEXT", default=None)
  chat_template: str | None = None
  no_bos: bool = False
  parse_special: bool = False
  max_new_tokens: Count = 64
  temperature: Amount = 0.0
  top_p: Annotated[float, Range(0, 1, "(]")] = 1.0
  sample_top_k: Natural = 0
  seed: Annotated[int, Range(0, _SEEDS - 1, "[]")] = 0
  stop: tuple[str, ...] = command.option("repeated", "TEXT", default=())
  batch_size: Count = 8
  cache_dtype: Literal["float32", "bfloat16"] | None = None

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
      raise ValueError(
        "--prompt-file and --out must be given together; --prompt and "
        "--messages have --json FILE"
      )
    if self.out:
      command.out_file(self.out)
    texts = {"prompt": self.prompt, "stop": self.stop}
    texts["system"] = (self.system,) if self.system else ()
    for name, values in texts.items():
      if not all(map(is_utf8, values)):
        self.fail(name, "must be UTF-8")
    is_asked = bool(self.prompt or self.messages)
    plain = "must be of plain prompts: templates write special tokens"
    for name, fits, needed in (
      ("json", is_asked, "needs --prompt or --messages"),
      ("distributed", is_asked or self.prompt_file, "needs prompts"),
      ("system", self.chat and not self.messages, "needs --chat alone"),
      ("chat_template", self.is_chat, "needs --chat or --messages"),
      ("tools", self.is_chat, "needs --chat or --messages"),
      ("no_bos", not self.is_chat, plain),
      ("parse_special", not self.is_chat, plain),
      ("sample_top_k", self.temperature, "needs --temperature above 0"),
      ("top_p", self.temperature, "needs --temperature above 0"),
    ):
      self.need(name, fits, needed)
    _ = self.sampling

  @property
  def is_chat(self) -> bool:
    """Whether prompts go through the model's chat template."""
    return self.chat or self.messages is not None

  @property
  def sampling(self) -> Sampling:
    """How tokens are sampled."""
    return Sampling(
      max_new_tokens=self.max_new_tokens,
      temperature=self.temperature,
      top_k=self.sample_top_k,
      top_p=self.top_p,
      stop=self.stop,
      seed=self.seed,
    )

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
  from moh_jax.data.chat import chat_ids
  from moh_jax.data.text_files import read_prompts
  from moh_jax.inference.generate import Generator, complete_file
  from moh_jax.inference.restore import load_checkpoint_tokenizer
  from moh_jax.runtime import sharding

  lines = read_prompts(options.prompt_file) if options.prompt_file else None
  asked: list[dict[str, Any]] = [{"prompt": text} for text in options.prompt]
  if options.messages:
    asked = [{"messages": read_messages(options.messages)}]
  elif options.chat:
    asked = [{"messages": options.conversation([t])} for t in options.prompt]
  tools = options.tools and (read_json(options.tools, list[dict]) or None)
  options.join()
  metadata, step = options.stored("generate")
  tokenizer = load_checkpoint_tokenizer(options.checkpoint, step)

  def prompt_in(one: dict[str, Any]) -> Prompt:
    if "prompt" in one:
      return one["prompt"]
    name = options.chat_template
    return chat_ids(tokenizer, one["messages"], name, tools=tools)

  def prompt_of(turns: Sequence[str]) -> Prompt:
    talk = {"messages": options.conversation(turns)}
    return prompt_in(talk if options.is_chat else {"prompt": turns[-1]})

  prompts = list(map(prompt_in, asked))
  mesh = sharding.make_mesh(metadata.config.mesh)
  with sharding.use_mesh(mesh):
    restored = options.restore(mesh=mesh)
  generator = Generator(
    restored,
    tokenizer,
    mesh=mesh,
    cache_dtype=options.cache_dtype,
    batch_size=options.batch_size,
    add_bos=False if options.no_bos else None,
    parse_special=options.parse_special,
  )
  del restored  # the generator has its own copy of the parameters
  if lines:
    before = complete_file(
      generator,
      lines,
      options.out,
      options.sampling,
      settings=_settings(options, generator, metadata.config.eval.use_ema)
      | ({"tools": tools} if tools else {}),
      prompt_of=prompt_of,
    )
    told = f"{len(lines):,} completions in {options.out}"
    options.give({}, [f"{told}; {before:,} were there"])
  elif not asked:
    _interact(generator, options.sampling, prompt_of)
  elif len(prompts) == 1 and not options.json:
    pieces = generator.stream(prompts[0], options.sampling)
    first = next(pieces, "")  # a bad prompt is an error before any output
    shown = asked[0].get("prompt", "")
    for piece in itertools.chain([shown, first], pieces, ["\n"]):
      if options.is_first():
        _print(piece)
  else:
    completions = generator.generate(prompts, options.sampling)
    told = [
      f"{one.get('prompt', '')}{made.text}\n[{made.finish_reason}]\n"
      for one, made in zip(asked, completions)
    ]
    rows = [
      one | dataclasses.asdict(made) for one, made in zip(asked, completions)
    ]
    options.give({"completions": rows, "step": step}, told)
  return 0


def read_messages(path: str) -> list[dict[str, Any]]:
  """Reads a conversation.

  Args:
    path: of a JSON list of objects with "role" and "content".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no such list.
  """
  import json

  from moh_jax.data.chat import check_messages

  messages = read_json(path, list[dict])
  try:
    check_messages(messages)
    json.dumps(messages, ensure_ascii=False).encode()
  except ValueError as error:  # UnicodeEncodeError too: half a surrogate pair
    raise ValueError(f"{path}: {error}") from error
  return messages


def _settings(
  options: Options, generator: Generator, use_ema: bool
) -> dict[str, Any]:
  """What the texts depend on, beside prompts and sampling."""
  from moh_jax.runtime.devices import random_settings

  tokenizer = generator.tokenizer
  # With the files beside it, which say chat templates and ends of texts.
  files = repr((tokenizer.sha256, sorted(tokenizer.files.items())))
  return {
    "checkpoint": generator.fingerprint(),
    "ema": use_ema,
    "routed_heads": options.top_k,  # "top_k" is that of the sampling
    "gate_form": options.change("model.router.gate_form"),
    "dtype": generator.config.dtype,
    "cache_dtype": options.cache_dtype,
    "chat": options.chat,
    "system": options.system,
    "chat_template": options.chat_template,
    "no_bos": options.no_bos,
    "parse_special": options.parse_special,
    "tokenizer": hashlib.sha256(files.encode()).hexdigest(),
    **random_settings(),
  }


def _print(piece: str) -> None:
  """Shows text of the model; a terminal takes no commands from it."""
  if sys.stdout.isatty():
    piece = printable(piece)
  print(piece, end="", flush=True)


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
  if sys.stdin.isatty():
    print("A line is a prompt. Ctrl-C ends an answer, Ctrl-D all.")
  asked, turns = 0, []
  while True:
    try:
      line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
      print()
      return
    except KeyboardInterrupt:
      print()
      continue
    if not line:
      continue
    seed = (sampling.seed + asked) % _SEEDS
    asked += 1
    seeded, answer = dataclasses.replace(sampling, seed=seed), ""
    turns.append(line)
    try:
      for piece in generator.stream(prompt_of(turns), seeded):
        answer += piece
        _print(piece)
    except ValueError as error:  # such as a prompt that is too long
      print(f"error: {error}", end="")
      turns.clear()  # or a conversation that became too long could not end
    except KeyboardInterrupt:
      pass
    print()
    if turns:
      turns.append(answer)
