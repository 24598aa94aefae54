"""Small data and runs under the names that the docs use.

With these the examples run in seconds: `runs/digits` is a ViT of random
numbers, `IMAGES` a folder of noise, and so on.
"""

import dataclasses
import gzip
import json

from moh_jax.config import without_router
from moh_jax.data.tokenizers import train_bpe
from tests.cli import tiny_checkpoint
from tests.convert import tiny_llm
from tests.docs.blocks import ROOT
from tests.inference import tiny_text_model, tiny_vae
from tests.training import tiny

_LINKED = (
  *("benchmarks", "configs", "docs", "moh_jax", "tests"),
  *("README.md", "pyproject.toml", "train.py"),
)
_RUNS = {"digits": tiny.config(), "dit": tiny.dit_config()}


def lay_out(folder):
  """Fills a folder with the repository's files and small data; returns it."""
  for name in _LINKED:
    (folder / name).symlink_to(ROOT / name)
  (folder / "runs").mkdir()
  (folder / "models").mkdir()
  for part in ("train", "val"):
    tiny_vae.save_images(folder / "IMAGES" / part, per_class=10)
  tiny_vae.save(folder / "VAE")
  texts = (ROOT / "README.md").read_text().split("\n\n")
  (folder / "TEXT").mkdir()
  with gzip.open(folder / "TEXT" / "readme.jsonl.gz", "wt") as stream:
    stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
  _save_llama(folder / "LLAMA", texts)
  (folder / "CHATS").mkdir()
  for part in ("train", "val"):
    row = json.dumps({"instruction": "Greet", "output": "Hello"})
    (folder / "CHATS" / f"{part}.jsonl").write_text(row)
  order = [list(range(4))] * 2
  (folder / "heads.json").write_text(json.dumps({"head_order": order}))
  prompts = ("def main(", "import ")
  rows = [json.dumps({"prompt": text}) + "\n" for text in prompts]
  (folder / "prompts.jsonl").write_text("".join(rows))
  return folder


def _save_llama(folder, texts):
  """Writes a LLaMA of random numbers, as transformers stores it."""
  model = dataclasses.replace(
    tiny_text_model.CONFIG.model, vocab_size=300, max_length=256
  )
  every = {"shared_heads": (4, 4), "top_k": (0, 0)}
  tiny_llm.write_folder(folder, without_router(model, **every))
  (folder / "tokenizer.json").write_bytes(train_bpe(texts, 300))
  source = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
  (folder / "chat_template.jinja").write_text(source)


def add_runs(folder):
  """Puts small checkpoints where the docs' runs would be."""
  for name, config in _RUNS.items():
    where = folder / "runs" / name
    tiny_checkpoint.save_random(where, config, tiny_checkpoint.DIGITS)
  config = tiny_text_model.CONFIG
  model = dataclasses.replace(config.model, max_length=128)
  tiny_text_model.save(
    folder / "runs" / "llm", dataclasses.replace(config, model=model)
  )
