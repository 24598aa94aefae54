"""Records what transformers makes of small tokenizers and chat templates.

It needs transformers, tokenizers, sentencepiece and jinja2; `make` trains the
tokenizers, and `record` adds one version's results. It writes to
tests/data/recorded/:

  python tests/tools/record_tokenizers.py make
  python tests/tools/record_tokenizers.py record  # in an environment each of
                                                  # transformers 4 and 5
"""

import hashlib
import io
import json
import pathlib
import pydoc_data.topics
import shutil
import sys

import sentencepiece
import tokenizers as hf

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from random_texts import random_texts

_RECORDED = pathlib.Path(__file__).parents[1] / "data/recorded"
ROOT, CHAT = _RECORDED / "tokenizers", _RECORDED / "chat"
_CORPUS = [
  *list(pydoc_data.topics.topics.values())[:12],
  "Grüße aus Köln 你好世界 привет мир こんにちは 👩‍👩‍👧‍👦 🇩🇪 Hello world I'm\n"
  * 40,
]
_LLAMA3 = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_VOCAB = 340
# Special tokens come first, except where a case says another.
_SPECIAL = {
  "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
  "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
  "gpt2": ["<|endoftext|>"],
}
_LLAMA2_CONFIG = {
  "add_bos_token": True,
  "add_eos_token": False,
  "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False,
                "normalized": False, "rstrip": False, "single_word": False},
  "eos_token": "</s>",
  "unk_token": "<unk>",
  "legacy": False,
  "clean_up_tokenization_spaces": False,
  "tokenizer_class": "LlamaTokenizer",
}  # fmt: skip
_CONFIGS = {
  "llama3": {
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
  },
  "qwen2": {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "Qwen2Tokenizer",
  },
  "gpt2": {
    "add_prefix_space": False,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "tokenizer_class": "GPT2Tokenizer",
  },
}


def _byte_bpe(name: str) -> hf.Tokenizer:
  pre, decoders = hf.pre_tokenizers, hf.decoders
  made = hf.Tokenizer(hf.models.BPE(ignore_merges=name == "llama3"))
  if name == "gpt2":
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    made.post_processor = hf.processors.ByteLevel(trim_offsets=False)
  else:
    pattern = hf.Regex(_LLAMA3 if name == "llama3" else _QWEN2)
    made.pre_tokenizer = pre.Sequence([
      pre.Split(pattern, "isolated"),
      pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.post_processor = hf.processors.ByteLevel(trim_offsets=False)
  if name == "qwen2":
    made.normalizer = hf.normalizers.NFC()
  made.decoder = decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=_VOCAB,
    initial_alphabet=pre.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(_CORPUS, trainer)
  made.add_special_tokens(_SPECIAL[name])
  if name == "qwen2":
    made.add_tokens(["<tool_call>"])
  if name == "llama3":
    begin = _SPECIAL[name][0]
    template = hf.processors.TemplateProcessing(
      single=f"{begin}:0 $A:0",
      pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
      special_tokens=[(begin, made.token_to_id(begin))],
    )
    both = [hf.processors.ByteLevel(trim_offsets=False), template]
    made.post_processor = hf.processors.Sequence(both)
  return made


def _write(folder: pathlib.Path, files: dict[str, object]) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  for name, value in files.items():
    (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False))


def make() -> None:
  """Trains the tokenizers and writes their folders."""
  from transformers import AutoTokenizer

  for name, config in _CONFIGS.items():
    folder = ROOT / name
    _write(folder, {"tokenizer_config.json": config})
    (folder / "tokenizer.json").write_text(_byte_bpe(name).to_str())
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter("\n".join(_CORPUS).split("\n")),
    model_writer=model,
    vocab_size=460,
    model_type="bpe",
    byte_fallback=True,
    character_coverage=0.999,
    split_digits=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=True,
    allow_whitespace_only_pieces=True,
    minloglevel=2,
  )
  added = [("<pad>", True), ("<|im_end|>", True), ("<tool_call>", False)]
  decoder = {
    str(model_size + i): {
      "content": text, "special": special, "lstrip": False, "rstrip": False,
      "normalized": False, "single_word": False,
    }
    for model_size in (460,)
    for i, (text, special) in enumerate(added)
  }  # fmt: skip
  for name, more in (
    ("llama2", {}),
    ("llama2_legacy", {"legacy": True}),
    ("llama2_added", {"added_tokens_decoder": decoder}),
  ):
    _write(ROOT / name, {"tokenizer_config.json": _LLAMA2_CONFIG | more})
    (ROOT / name / "tokenizer.model").write_bytes(model.getvalue())
  target = ROOT / "llama2_json"
  AutoTokenizer.from_pretrained(ROOT / "llama2").save_pretrained(target)
  for extra in ("tokenizer.model", "special_tokens_map.json"):
    (target / extra).unlink(missing_ok=True)
  shutil.copy(ROOT / "llama2" / "tokenizer_config.json", target)


def digest(ids: list[list[int]]) -> str:
  """SHA-256 of the tokens of many texts."""
  return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _encode(tokenizer, texts, special, split):
  ids = []
  for text in texts:
    ids.append(
      tokenizer(text, add_special_tokens=special, split_special_tokens=split)[
        "input_ids"
      ]
    )
  return ids


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
    if "--all" in sys.argv:
      where = pathlib.Path("/tmp") / f"{folder.name}_{path.name}"
      where.write_text(json.dumps(cases))
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
  {"make": make, "record": record}[sys.argv[1]]()
