"""The examples of README.md and docs/: code blocks, and how each is tested.

A block of `sh` or `python` runs with `pytest -m integration` unless a comment
above it says otherwise; docs/contributing.md has these comments.
"""

import dataclasses
import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
# The pages that make runs come first; others use these runs.
FIRST = ("docs/index.md", "README.md", "docs/vit.md", "docs/dit.md")

# A mark, and a block below it.
_BLOCK = re.compile(
  r"(?:^<!-- test: (?:(slow)|(parse|none): [^\n]+) -->\n)?"
  r"^```(\w*)\n(.*?)^```$",
  re.DOTALL | re.MULTILINE,
)
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
    mode: how it is tested: "run", "slow", "parse" or "none".
  """

  page: str
  line: int
  language: str
  code: str
  mode: str

  def __str__(self):
    return f"{self.page}:{self.line}"


class Command(NamedTuple):
  """A module such as "benchmarks.digits", its arguments, and its variables."""

  module: str
  arguments: list[str]
  environment: dict[str, str]


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
    ValueError: a mark is unknown, lacks its reason or is above no block.
  """
  blocks, found = [], list(_BLOCK.finditer(content))
  marks = sum(match[0].startswith("<!--") for match in found)
  if marks != len(re.findall(r"^ *<!-- test: ", content, re.MULTILINE)):
    raise ValueError(
      f"{page}: a mark must be 'slow', 'parse: REASON' or 'none: REASON', and "
      "stand above a block"
    )
  for match in found:
    slow, other, language, code = match.groups()
    if language in ("sh", "python"):
      line = content.count("\n", 0, match.start(4)) + 1
      mode = slow or other or "run"
      blocks.append(Block(page, line, language, code.rstrip("\n"), mode))
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
  environment = {}
  while _ASSIGNMENT.match(words[0]):
    name, _, value = words.pop(0).partition("=")
    environment[name] = value
  match words:
    case [_, "-m", module, *arguments]:
      return Command(module, arguments, environment)
    case [_, "train.py", *arguments]:
      return Command("moh_jax", ["train", *arguments], environment)
  raise ValueError(f"{words} is no command that the tests know")
