"""A tokenizer with a chat template, and files of rows, for tests."""

import json
import pathlib

import tokenizers as hf

from moh_jax.data.tokenizers import JsonTokenizer, train_bpe

SPECIAL = ("<|start|>", "<|head|>", "<|stop|>")
CONFIG = {"eos_token": "<|stop|>", "bos_token": "<|begin_of_text|>"}
WORDS = ("a", "two ", " é", "\n", "naïve", "\t\t", "😀", "<th", "x=1;", "Q")
TEMPLATES = pathlib.Path(__file__).parent / "recorded/templates"


def template(name, *, marks=False):
  """A template in the manner of a model's own, see `marked`."""
  source = (TEMPLATES / f"{name}.jinja").read_text()
  return marked(source, marks=marks)


def marked(source, *, marks):
  """A template whose << and >> are the marks of transformers, or nothing."""
  for mark, tag in (("<<", "generation"), (">>", "endgeneration")):
    source = source.replace(mark, f"{{%- {tag} -%}}" if marks else "")
  return source


def tokenizer(template, special=SPECIAL, config=CONFIG):
  """A tokenizer of a few words, with a template beside it."""
  made = hf.Tokenizer.from_str(train_bpe(WORDS, 300).decode())
  made.add_special_tokens(list(special))
  files = {
    "chat_template.jinja": template.encode(),
    "tokenizer_config.json": json.dumps(config).encode(),
  }
  return JsonTokenizer(made.to_str().encode(), files)


def write_tokenizer(folder: pathlib.Path):
  """Writes the tokenizer with ChatML, and returns it."""
  made = tokenizer(template("chatml"))
  for name, content in {made.file_name: made.content, **made.files}.items():
    (folder / name).write_bytes(content)
  return made


def write_rows(path: pathlib.Path, *rows):
  """Writes JSON lines; a text is a line as it is."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text("".join(f"{line}\n" for line in lines))
