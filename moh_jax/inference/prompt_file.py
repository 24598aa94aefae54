"""Completions of many prompts, in a file that grows and can be continued."""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import tqdm

from moh_jax.data.text_files import Prompts
from moh_jax.inference.generate import Generator, Prompt
from moh_jax.inference.options import Sampling
from moh_jax.runtime.files import disk_errors, replacing
from moh_jax.runtime.json_files import plain, read_json, strict_json
from moh_jax.runtime.peers import ask_first_process

# Batches whose prompts are sorted by length and written together.
_CHUNK_BATCHES = 8


def complete_file(
  generator: Generator,
  prompts: Prompts,
  out: str | os.PathLike,
  sampling: Sampling,
  *,
  settings: dict[str, Any],
  prompt_of: Callable[[Sequence[str]], Prompt] = lambda turns: turns[-1],
  progress: bool = False,
) -> int:
  """Writes on from every prompt of a file.

  OUT gets a line of JSON for each prompt, in order: "index" (from 0), "prompt"
  and the fields of `Completion`. A call that was killed goes on after the last
  whole line, and the file ends as if nothing had happened. OUT.settings.json
  says what it was made with. Prompt i has the samples of prompt i in one call
  of `Generator.generate`, whatever the batches.

  Args:
    generator: the model; its `batch_size` texts are written at one time.
    prompts: of the file.
    out: file to write, or to continue.
    sampling: how tokens are sampled.
    settings: what else the texts depend on, as JSON values, such as the
      checkpoint; a later call must have the same.
    prompt_of: from the row's text, alone in a list, to the prompt.
    progress: show a progress bar on stderr, where that is a terminal.

  Returns:
    Number of completions that were there before.

  Raises:
    ValueError: a prompt is too long for the model, or `out` holds completions
      of other settings or something else.
    OSError: a line cannot be written; those before it are whole.
  """
  out = pathlib.Path(out)
  settings = {
    "prompts": prompts.sha256,
    **settings,
    **dataclasses.asdict(sampling),
  }
  for index, prompt in enumerate(prompts):
    generator.check(index, prompt_of([prompt]), sampling)
  (done,) = ask_first_process(lambda: [_open(out, settings)], 1)
  is_first = jax.process_index() == 0
  with tqdm.tqdm(
    total=len(prompts),
    initial=done,
    unit="prompt",
    disable=not progress or not is_first or None,
  ) as bar:
    for first, rows in _complete(generator, prompts, sampling, prompt_of, done):
      rows = rows[max(done - first, 0) :]
      if is_first:
        _append(out, rows)
      bar.update(len(rows))
  return done


def _complete(
  generator: Generator,
  prompts: Prompts,
  sampling: Sampling,
  prompt_of: Callable[[Sequence[str]], Prompt],
  done: int,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
  """The chunks that are not done: index of the first prompt, and lines."""
  size = _CHUNK_BATCHES * generator.batch_size
  # A chunk that is half written is made again, with the same batches.
  first = done // size * size if done < len(prompts) else done
  texts = itertools.islice(prompts, first, None)
  while chunk := list(itertools.islice(texts, size)):
    made = [prompt_of([text]) for text in chunk]
    completions = generator.generate(made, sampling, first=first)
    yield (
      first,
      [
        {"index": index, "prompt": prompt, **dataclasses.asdict(completion)}
        for index, (prompt, completion) in enumerate(
          zip(chunk, completions), first
        )
      ],
    )
    first += len(chunk)


def _append(out: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  with disk_errors(str(out), "the lines before are"), out.open("ab") as file:
    file.writelines(strict_json(row).encode() + b"\n" for row in rows)
    file.flush()
    os.fsync(file.fileno())


def _open(out: pathlib.Path, settings: dict[str, Any]) -> int:
  """Starts the file, or cuts off a half-written line; returns whole lines."""
  stated = out.with_name(out.name + ".settings.json")
  wanted = plain(settings)  # tuples as stored: lists
  if not out.exists():
    with disk_errors(str(stated), "nothing else is"), replacing(stated) as path:
      path.write_text(json.dumps(wanted, indent=2) + "\n")
    out.touch()
    return 0
  if not stated.exists():
    raise ValueError(
      f"{out} exists, and no {stated.name} beside it says what it was made "
      "with; choose another --out"
    )
  found = read_json(stated)
  differing = [
    f"{name}: {wanted.get(name)!r} here, {found.get(name)!r} there"
    for name in {**found, **wanted}
    if wanted.get(name) != found.get(name)
  ]
  if differing:
    raise ValueError(
      f"{out} holds completions of other settings; {'; '.join(differing)}. "
      "Choose another --out or the same settings"
    )
  lines, size = 0, 0
  with out.open("r+b") as file:
    for line in file:
      if line.endswith(b"\n"):
        lines, size = lines + 1, size + len(line)
    file.truncate(size)
  return lines
