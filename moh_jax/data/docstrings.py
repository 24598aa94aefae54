"""Questions about Python's standard library: conversations without a download.

Each public function, class and method that has a docstring is asked for in one
form, "What does os.path.join do?", and answered by the docstring's first
sentence. Held out are the packages that "stdlib" holds out, and the tokenizer
is that of "stdlib", so that a model of its runs can be tuned.
"""

import ast
import dataclasses
import json
import pathlib
import re
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import SPLITS
from moh_jax.data.conversations import ChatSource
from moh_jax.data.stdlib import (
  BPE_TOKENS,
  list_sources,
  train_tokenizer,
  write_once,
)
from moh_jax.data.tokenizer_files import TEMPLATE, write_tokenizer_files

# ChatML, with the begin and the end of text around each message.
_CHATML = """\
{% for message in messages %}
{{ bos_token }}{{ message.role }}
{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ bos_token }}assistant
{% endif %}
"""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class DocstringSource(ChatSource):
  """The questions and answers, written on first use."""

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, ChatSource]:
    """Opens a split of what `_write` makes."""
    write_once(pathlib.Path(data.path), _write)
    own = dataclasses.replace(data, source="chat", tokenizer_path=data.path)
    return {data.source: ChatSource(own, vocab_size, split)}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The vocabulary of the tokenizer."""
    del config, names
    return {"vocab_size": BPE_TOKENS}


def _write(folder: pathlib.Path) -> None:
  parts = list_sources()
  tokenizer = train_tokenizer(parts[0], BPE_TOKENS)
  own = {tokenizer.file_name: tokenizer.content, TEMPLATE: _CHATML.encode()}
  write_tokenizer_files(folder, own)
  for split, files in zip(SPLITS, parts):
    with (folder / f"{split}.jsonl").open("w") as stream:
      for name, answer in _answers(files):
        question = {"role": "user", "content": f"What does {name} do?"}
        messages = [question, {"role": "assistant", "content": answer}]
        stream.write(json.dumps({"messages": messages}) + "\n")


def _answers(files: Iterable[pathlib.Path]) -> Iterator[tuple[str, str]]:
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
