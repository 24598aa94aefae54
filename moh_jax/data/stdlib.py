"""The sources of Python's standard library as text: 10 MiB without a download.

Each file is one document; the files of the packages `HELD_OUT` are the held-out
text. The sources differ between versions of Python, so metrics can be compared
within one version only.
"""

import pathlib
import sysconfig
from collections.abc import Collection, Iterable
from typing import Any

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import SPLITS
from moh_jax.data.files import StrPath
from moh_jax.data.sequences import PackedSource
from moh_jax.data.tokenizers import BytesTokenizer, JsonTokenizer, train_bpe
from moh_jax.data.tokens import tokenize

HELD_OUT = ("asyncio", "email", "json", "logging")
_EXCLUDED = {
  "__pycache__",
  *("idle_test", "test", "tests"),
  *("dist-packages", "site-packages"),
}
_SHARD_BYTES = 4 << 20
BPE_TOKENS = 2048  # 10 MiB of text train no more


class StdlibSource(PackedSource):
  """The standard library, tokenized on first use."""

  @classmethod
  def folders(
    cls, data: TextDataConfig, vocab_size: int
  ) -> dict[str, pathlib.Path]:
    """The folder that `prepare` makes."""
    return {data.source: prepare(data.path, data.tokenizer, vocab_size)}

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The vocabulary of the tokenizer that `prepare` makes."""
    is_bytes = config.data.tokenizer == "bytes"
    return {"vocab_size": 257 if is_bytes else BPE_TOKENS}


def prepare(path: StrPath, tokenizer: str, vocab_size: int) -> pathlib.Path:
  """Tokenizes the standard library, unless an earlier call did.

  Args:
    path: folder for the sets of all tokenizers; created.
    tokenizer: "bpe", which is trained on the training part, or "bytes".
    vocab_size: entries of the BPE.

  Returns:
    The folder with the sets train/ and val/.

  Raises:
    FileNotFoundError: this Python is installed without its sources.
  """
  is_bpe = tokenizer == "bpe"
  folder = pathlib.Path(path, f"bpe{vocab_size}" if is_bpe else tokenizer)
  if not (folder / "val" / "metadata.json").is_file():  # written last
    parts = list_sources()
    used = train_tokenizer(parts[0], vocab_size) if is_bpe else BytesTokenizer()
    for split, files in zip(SPLITS, parts):
      names = list(map(str, files))
      tokenize(names, used, folder, split, shard_bytes=_SHARD_BYTES)
  return folder


def train_tokenizer(
  files: Iterable[pathlib.Path], vocab_size: int
) -> JsonTokenizer:
  """Trains the BPE of "stdlib" on files."""
  # Decoded here, since reading as text would convert line ends.
  texts = (file.read_bytes().decode() for file in files)
  return JsonTokenizer(train_bpe(texts, vocab_size))


def list_sources() -> tuple[list[pathlib.Path], list[pathlib.Path]]:
  """Lists the files of the training part and of the held-out part, in order.

  Raises:
    FileNotFoundError: this Python is installed without its sources.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  train, held_out = [], []
  for file in sorted(root.rglob("*.py")):
    folders = file.relative_to(root).parts[:-1]
    if _EXCLUDED.isdisjoint(folders) and _is_text(file.read_bytes()):
      (held_out if {*folders[:1]} & {*HELD_OUT} else train).append(file)
  if not train or not held_out:
    raise FileNotFoundError(f"{root} lacks the standard library's .py files")
  return train, held_out


def _is_text(content: bytes) -> bool:
  return content.decode(errors="ignore").encode() == content != b""
