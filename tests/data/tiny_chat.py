"""A tokenizer with a chat template, and files of rows, for tests."""

import json
import pathlib

import tokenizers as hf

from moh_jax.config import TextDataConfig
from moh_jax.data import tokenizers
from moh_jax.data.conversations import ChatSource
from moh_jax.data.tokenizers import JsonTokenizer, train_bpe
from tests.folders import FolderTest

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


def in_transformers(tokenizer):
  """What transformers makes of messages and a template: ids and masks."""
  from transformers import PreTrainedTokenizerFast

  made = hf.Tokenizer.from_str(tokenizer.content.decode())
  theirs = PreTrainedTokenizerFast(tokenizer_object=made, **CONFIG)
  masks = {"return_assistant_tokens_mask": True, "return_dict": True}
  return lambda messages, source, **options: theirs.apply_chat_template(
    messages, chat_template=source, **masks, **options
  )


def write_tokenizer(folder: pathlib.Path):
  """Writes the tokenizer with ChatML, and returns it."""
  made = tokenizer(template("chatml"))
  files = {made.file_name: made.content, **made.files}
  tokenizers.write_tokenizer_files(folder, files)
  return made


def write_rows(path: pathlib.Path, *rows):
  """Writes JSON lines; a text is a line as it is."""
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text("".join(f"{line}\n" for line in lines))


def user(text):
  return {"role": "user", "content": text}


def bot(text, **fields):
  return {"role": "assistant", "content": text, **fields}


def ask(*answers, question="a?"):
  return [m for answer in answers for m in (user(question), bot(answer))]


class ChatTest(FolderTest):
  """Tests with a tokenizer and a template in their folder."""

  def setUp(self):
    super().setUp()
    self.tokenizer = write_tokenizer(self.root)

  def use(self, source, *, marks=False):
    """Takes another template: one in `TEMPLATES`, or a text."""
    if source.isidentifier():
      source = template(source, marks=marks)
    made = marked(source, marks=marks)
    (self.root / "chat_template.jinja").write_text(made)

  def data(self, **fields):
    root = str(self.root)
    fields = {"path": root, "tokenizer_path": root} | fields
    return TextDataConfig(**{"source": "chat"} | fields)

  def open(self, *rows, kind=ChatSource, split="train", **fields):
    """Opens a source, after these rows are written to its file."""
    if rows:
      write_rows(self.root / f"{split}.jsonl", *rows)
    source = "chat" if kind is ChatSource else "preference"
    return kind(self.data(source=source, **fields), 400, split)

  def decode(self, ids):
    kept = [int(i) for i in ids]
    return self.tokenizer.parser.decode(kept, skip_special_tokens=False)

  def trained(self, source):
    """Trained text of each sequence."""
    rows = [source[i] for i in range(len(source))]
    return [self.decode(x["targets"][x["weights"] > 0]) for x in rows]
