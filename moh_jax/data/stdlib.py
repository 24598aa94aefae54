"""The sources of Python's standard library as text: 10 MiB without a download.

Each file is one document; the files of the packages `HELD_OUT` are the held-out
text. The sources differ between versions of Python, so metrics can be compared
within one version only.
"""

import functools
import glob
import gzip
import logging
import lzma
import os
import pathlib
import platform
import shutil
import sysconfig
from collections.abc import Callable, Collection, Iterable
from typing import Any

from moh_jax.config import Config
from moh_jax.config.data import TextDataConfig
from moh_jax.config.registry import SPLITS
from moh_jax.data import tokenizers
from moh_jax.data.sequences import PackedSource, open_sets
from moh_jax.data.token_sets import TokenSet
from moh_jax.data.tokenize import tokenize
from moh_jax.runtime.files import temporary_beside

HELD_OUT = ("asyncio", "email", "json", "logging")
_EXCLUDED = {
  "__pycache__",
  *("idle_test", "test", "tests"),
  *("dist-packages", "site-packages"),
}
_PIECE_BYTES = 4 << 20
_XZ_PRESET = 9
BPE_TOKENS = 2048  # 10 MiB of text train no more
_LOG = logging.getLogger(__name__)
_warn_once = functools.cache(_LOG.warning)  # though each split is opened


class StdlibSource(PackedSource):
  """The standard library, tokenized on first use."""

  @classmethod
  def open(
    cls, data: TextDataConfig, vocab_size: int, split: str
  ) -> dict[str, PackedSource]:
    """Opens a split of what `prepare` makes."""
    folder = prepare(data.path, data.tokenizer, vocab_size)
    return open_sets({data.source: folder}, data, vocab_size, split)

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """The vocabulary of the tokenizer that `prepare` makes."""
    del names
    is_bytes = config.data.tokenizer == "bytes"
    return {"vocab_size": 257 if is_bytes else BPE_TOKENS}


def prepare(
  path: str | os.PathLike, tokenizer: str, vocab_size: int
) -> pathlib.Path:
  """Tokenizes the standard library, unless an earlier call did.

  The notes of the held-out set are "python" (the version), and "gzip_bytes" and
  "xz_bytes": the size of its text under gzip -9 and xz -9. Sets that another
  version of Python made are used with a warning.

  Args:
    path: folder for the sets of all tokenizers; created.
    tokenizer: "bpe", which is trained on the training part, or "bytes".
    vocab_size: entries of the BPE.

  Returns:
    The folder with the sets train/ and val/.

  Raises:
    FileNotFoundError: this Python is installed without its sources.
    ValueError: an existing set is damaged.
  """
  name = f"bpe{vocab_size}" if tokenizer == "bpe" else tokenizer
  folder = pathlib.Path(path) / name
  write_once(folder, lambda growing: _write(growing, tokenizer, vocab_size))
  notes = [TokenSet(folder / split).metadata["notes"] for split in SPLITS]
  made_by = notes[0].get("python", "unknown")
  if made_by != platform.python_version():
    _warn_once(
      "%s has the sources of Python %s, this is Python %s: compare metrics "
      "within one version only; remove the folder to make it anew",
      *(folder, made_by, platform.python_version()),
    )
  return folder


def write_once(
  folder: pathlib.Path, write: Callable[[pathlib.Path], None]
) -> None:
  """Makes a folder, which appears when it is whole, unless it is there.

  Args:
    folder: to make.
    write: writes the content into the folder of another name that it creates.
  """
  if folder.is_dir():
    return
  growing = temporary_beside(folder)
  try:
    write(growing)
    growing.rename(folder)
  except OSError:
    if not folder.is_dir():  # else another process made it before
      raise
  finally:
    shutil.rmtree(growing, ignore_errors=True)


def train_tokenizer(
  files: Iterable[pathlib.Path], vocab_size: int
) -> tokenizers.JsonTokenizer:
  """Trains the BPE of "stdlib" on files."""
  # Decoded here, since reading as text would convert line ends.
  texts = (file.read_bytes().decode() for file in files)
  return tokenizers.JsonTokenizer(tokenizers.train_bpe(texts, vocab_size))


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
    raise FileNotFoundError(
      f"{root} lacks the sources of the standard library (.py files, among "
      f"them the packages {HELD_OUT})"
    )
  return train, held_out


def _write(folder: pathlib.Path, tokenizer: str, vocab_size: int):
  folder.mkdir(parents=True)
  train, held_out = list_sources()
  used: tokenizers.Tokenizer = tokenizers.BytesTokenizer()
  if tokenizer == "bpe":
    used = train_tokenizer(train, vocab_size)
  content = b"".join(file.read_bytes() for file in held_out)
  sizes = {
    "gzip_bytes": len(gzip.compress(content, 9, mtime=0)),
    "xz_bytes": len(lzma.compress(content, preset=_XZ_PRESET)),
  }
  python = {"python": platform.python_version()}
  for split, files, notes in (
    ("train", train, python),
    ("val", held_out, {**python, **sizes}),
  ):
    paths = [glob.escape(str(file)) for file in files]
    options = {"piece_bytes": _PIECE_BYTES, "notes": notes}
    tokenize(paths, used, folder, split, **options)


def _is_text(content: bytes) -> bool:
  return content.decode(errors="ignore").encode() == content != b""
