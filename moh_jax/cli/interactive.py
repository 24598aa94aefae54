"""Prompts from the terminal, one line after another."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence

from moh_jax.config.llm import Sampling
from moh_jax.inference.generate import Generator, Prompt

_SEEDS = 2**32


def run(
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
        print(piece, end="", flush=True)
    except ValueError as error:  # such as a prompt that is too long
      print(f"error: {error}", end="")
      turns.clear()  # or a conversation that became too long could not end
    except KeyboardInterrupt:
      pass
    print()
    if turns:
      turns.append(answer)
