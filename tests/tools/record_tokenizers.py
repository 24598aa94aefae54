"""Records what transformers makes of small tokenizers and chat templates.

It needs transformers, tokenizers, sentencepiece and jinja2, and adds one
version's results to tests/data/recorded/ (run it in an environment each of
transformers 4 and 5):

  python tests/tools/record_tokenizers.py

The tokenizers there were trained once, with at most 460 tokens, on the topics
of Python's help and a line of other scripts: byte-level BPE in the forms of
LLaMA 3, Qwen2 and GPT-2, and a SentencePiece model as LLaMA 2 has it.
texts.json has 1,000 random texts that are hard for tokenizers: words, code,
emoji, any characters, names of special tokens.
"""

import hashlib
import json
import pathlib

import transformers
from transformers import AutoTokenizer

_RECORDED = pathlib.Path(__file__).parents[1] / "data/recorded"
_FILE = f"transformers_{transformers.__version__}.json"


def main() -> None:
  """Records both."""
  texts = json.loads((_RECORDED / "texts.json").read_text())
  folder, result = _RECORDED / "tokenizers", {}
  for source in sorted(p for p in folder.iterdir() if p.is_dir()):
    tokenizer, cases = AutoTokenizer.from_pretrained(source), {}
    for name, special, split in (
      *(("as_text", False, True), ("parsed", False, False)),
      ("prompt", True, False),
    ):
      options = {"add_special_tokens": special, "split_special_tokens": split}
      ids = [tokenizer(text, **options)["input_ids"] for text in texts]
      sha256 = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
      cases[name] = {"sha256": sha256, "first": ids[:3]}
    result[source.name] = cases
  (folder / _FILE).write_text(json.dumps(result))
  _record_chat(AutoTokenizer.from_pretrained(folder / "llama2"))


def _record_chat(tokenizer) -> None:
  """Records what each template makes of each conversation, or its refusal."""
  folder, result = _RECORDED / "chat", {}
  conversations = json.loads((folder / "messages.json").read_text())
  for path in sorted(folder.glob("*.jinja")):
    for name, messages in conversations.items():
      for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "tokenize": False}
        options["chat_template"] = path.read_text()
        try:
          made = tokenizer.apply_chat_template(messages, **options)
          ids = tokenizer(made, add_special_tokens=False)["input_ids"]
          case = {"text": made, "ids": ids}
        except Exception as error:  # what the template raises
          case = {"refused": str(error)}
        result[f"{path.stem}/{name}/{prompt}"] = case
  (folder / _FILE).write_text(json.dumps(result, ensure_ascii=False))


main()
