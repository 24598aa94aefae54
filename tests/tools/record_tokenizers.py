"""Records what transformers makes of small tokenizers and chat templates.

It needs transformers, tokenizers, sentencepiece and jinja2, and adds one
version's results to tests/data/recorded/ (run it in an environment each of
transformers 4 and 5):

  python tests/tools/record_tokenizers.py

The tokenizers there were trained once, with at most 460 tokens, on the topics
of Python's help and a line of other scripts: byte-level BPE in the forms of
LLaMA 3, Qwen2 and GPT-2, and a SentencePiece model as LLaMA 2 has it.
"""

import hashlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from random_texts import random_texts

_RECORDED = pathlib.Path(__file__).parents[1] / "data/recorded"
ROOT, CHAT = _RECORDED / "tokenizers", _RECORDED / "chat"


def digest(ids: list[list[int]]) -> str:
  """SHA-256 of the tokens of many texts."""
  return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _encode(tokenizer, texts, special, split):
  options = {"add_special_tokens": special, "split_special_tokens": split}
  return [tokenizer(text, **options)["input_ids"] for text in texts]


def record() -> None:
  """Records the tokens of 1,000 texts, all as a hash and the first ones."""
  import transformers
  from transformers import AutoTokenizer

  texts = random_texts()
  path = ROOT / f"transformers_{transformers.__version__}.json"
  result = {}
  for folder in sorted(p for p in ROOT.iterdir() if p.is_dir()):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = {
      "as_text": _encode(tokenizer, texts, False, True),
      "parsed": _encode(tokenizer, texts, False, False),
      "prompt": _encode(tokenizer, texts, True, False),
    }
    result[folder.name] = {
      name: {"sha256": digest(ids), "first": ids[:3]}
      for name, ids in cases.items()
    }
  path.write_text(json.dumps(result))
  record_chat(path.name)


def record_chat(file: str) -> None:
  """Records what each template makes of each conversation, or its refusal."""
  from transformers import AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(ROOT / "llama2")
  conversations = json.loads((CHAT / "messages.json").read_text())
  result = {}
  for path in sorted(CHAT.glob("*.jinja")):
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
  (CHAT / file).write_text(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
  record()
