"""Questions about Python's standard library: conversations without a download.

  python -m docs.examples.docstrings data/docstrings

Each public function, class and method that has a docstring is asked for in one
form, "What does os.path.join do?", and answered by the docstring's first
sentence. The folder gets train.jsonl, val.jsonl (the packages that "stdlib"
holds out), and the tokenizer of "stdlib", so that a model of its runs can be
tuned, with `data.template=chatml`.
"""

import argparse
import ast
import json
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

from moh_jax.config.registry import SPLITS
from moh_jax.data.stdlib import BPE_TOKENS, list_sources, train_tokenizer

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def write(folder: pathlib.Path) -> None:
  """Writes the conversations and the tokenizer."""
  parts = list_sources()
  folder.mkdir(parents=True, exist_ok=True)
  content = train_tokenizer(parts[0], BPE_TOKENS).content
  (folder / "tokenizer.json").write_bytes(content)
  for split, files in zip(SPLITS, parts):
    with (folder / f"{split}.jsonl").open("w") as stream:
      for name, answer in answers(files):
        question = {"role": "user", "content": f"What does {name} do?"}
        messages = [question, {"role": "assistant", "content": answer}]
        stream.write(json.dumps({"messages": messages}) + "\n")


def answers(files: Iterable[pathlib.Path]) -> Iterator[tuple[str, str]]:
  """Full names in files, and the first sentences of their docstrings."""
  root = sysconfig.get_path("stdlib")
  for file in files:
    module = file.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    tree = ast.parse(file.read_bytes())
    yield from _documented(tree, module.removesuffix(".__init__"))


def _documented(node: Any, name: str) -> Iterator[tuple[str, str]]:
  if re.search(r"(^|\.)_", name):
    return
  is_module = isinstance(node, ast.Module)
  if not is_module and (text := ast.get_docstring(node)):
    paragraph = " ".join(text.partition("\n\n")[0].split())
    yield name, re.split(r"(?<=[.!?]) ", paragraph)[0]
  if not isinstance(node, _FUNCTIONS):  # what is inside has no full name
    for child in ast.iter_child_nodes(node):
      if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
        yield from _documented(child, f"{name}.{child.name}")


def main() -> None:
  """Writes into the folder that is named."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=pathlib.Path)
  write(parser.parse_args().folder)


if __name__ == "__main__":
  main()
