"""The examples of README.md and docs/: code blocks, and how each is tested.

A block of `sh` or `python` runs with `pytest -m fuzz` unless a comment above it
says otherwise; docs/contributing.md has the table of these comments.
"""

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[2]
# The pages that make runs come first; others use these runs.
FIRST = ("docs/index.md", "README.md", "docs/vit.md", "docs/dit.md")
MODES = ("run", "slow", "parse", "none")

_MARK = re.compile(r"<!-- test: (\w+)(?:: (.+))? -->")
# ``` {.python} has an included file, which other tests run.
_FENCE = re.compile(r"```(\w*)(?: \{.*\})?")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
# What sets an environment up; the examples' tests run in one that is.
_SET_UP = (("python3", "-m", "venv"), (".", ".venv/bin/activate"))


@dataclasses.dataclass(frozen=True)
class Block:
  """An example.

  Attributes:
    page: its file, from the repository's root.
    line: of its first line of code.
    language: "sh" or "python".
    code: its text.
    mode: one of `MODES`.
    reason: why it does not run, for "parse" and "none".
  """

  page: str
  line: int
  language: str
  code: str
  mode: str = "run"
  reason: str = ""

  def __str__(self):
    return f"{self.page}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Command:
  """A command line of Python.

  Attributes:
    module: "moh_jax", "benchmarks.digits", ...
    arguments: of the module.
    environment: variables that are set for it.
  """

  module: str
  arguments: tuple[str, ...]
  environment: tuple[tuple[str, str], ...] = ()


def pages() -> list[str]:
  """README.md and the pages of docs/ that are in git."""
  docs = sorted(f"docs/{file.name}" for file in ROOT.glob("docs/*.md"))
  return list(dict.fromkeys([*FIRST, *docs]))


def all_blocks() -> list[Block]:
  """The examples of all pages, in the order in which they depend."""
  return [
    block
    for page in pages()
    for block in read_blocks(page, (ROOT / page).read_text())
  ]


def read_blocks(page: str, content: str) -> list[Block]:
  """The blocks of `sh` and `python` of a page, with their marks.

  Raises:
    ValueError: a mark is unknown or lacks its reason.
  """
  blocks, code, language, start = [], None, "", 0
  mode, reason = "run", ""
  for number, line in enumerate(content.splitlines(), 1):
    if code is None and (mark := _MARK.fullmatch(line.strip())):
      mode, reason = mark[1], mark[2] or ""
      if mode not in MODES or (mode in ("parse", "none")) != bool(reason):
        raise ValueError(
          f"{page}:{number}: {line!r} must be one of {MODES}, with a reason "
          "after parse and none"
        )
    elif code is None and (fence := _FENCE.fullmatch(line)):
      code, language, start = [], fence[1], number + 1
    elif code is not None and line == "```":
      if language in ("sh", "python"):
        text = "\n".join(code)
        blocks.append(Block(page, start, language, text, mode, reason))
      code, mode, reason = None, "run", ""
    elif code is not None:
      code.append(line)
    elif line.strip() and not line.startswith("<!--"):
      mode, reason = "run", ""
  return blocks


def commands(code: str) -> list[Command]:
  """The command lines of a block of `sh`.

  Raises:
    ValueError: a line is something else than Python or setting it up.
  """
  found = []
  for line in code.replace("\\\n", " ").splitlines():
    words = shlex.split(line, comments=True)
    while words:
      end = words.index("&&") if "&&" in words else len(words)
      if command := _command(words[:end]):
        found.append(command)
      words = words[end + 1 :]
  return found


def _command(words: list[str]) -> Command | None:
  if tuple(words[:3]) in _SET_UP or tuple(words[:2]) in _SET_UP:
    return None
  if words[0].endswith("pip") and words[1] == "install":
    return None
  environment = []
  while _ASSIGNMENT.match(words[0]):
    name, _, value = words.pop(0).partition("=")
    environment.append((name, value))
  program, *rest = words
  if program.endswith("python") and rest[0] == "-m":
    return Command(rest[1], tuple(rest[2:]), tuple(environment))
  if program.endswith("python") and rest[0] == "train.py":
    return Command("moh_jax", ("train", *rest[1:]), tuple(environment))
  raise ValueError(f"{words} is no command that the tests know")
