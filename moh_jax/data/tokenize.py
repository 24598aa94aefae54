"""Tokenizing text files into token sets, on several processes.

A shard depends on the files, the tokenizer and the options alone, so a run that
was killed continues, on any number of processes, to the same bytes.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tqdm

from moh_jax.data.text_files import read_documents
from moh_jax.data.text_pieces import Piece, fingerprint, list_pieces
from moh_jax.data.token_set_writer import TokenSetWriter
from moh_jax.data.tokenizers import Tokenizer

PIECE_BYTES = 64 << 20
# What is encoded in one call: enough to share among threads.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 20


@dataclasses.dataclass(frozen=True)
class HeldOutPart:
  """Chooses the documents of one of two parts by a hash of their names.

  Attributes:
    share: of the documents in the held-out part.
    held_out: whether this is that part, or the rest.
  """

  share: float
  held_out: bool

  def __post_init__(self):
    if not 0 < self.share < 1:
      raise ValueError(f"held_out={self.share} must be between 0 and 1")

  def __call__(self, name: str) -> bool:
    """Whether a document belongs to the part."""
    content = name.encode(errors="surrogateescape")
    digest = hashlib.blake2b(content, digest_size=8).digest()
    number = int.from_bytes(digest, "little") / 2**64
    return (number < self.share) == self.held_out


@dataclasses.dataclass(frozen=True)
class _Job:
  """What a process needs to write shards; picklable."""

  writer: TokenSetWriter
  groups: list[tuple[Piece, ...]]
  tokenizer: Tokenizer
  field: str
  keep: Callable[[str], bool] | None

  def write(self, shard: int) -> int:
    """Writes one shard; returns the bytes of its pieces."""
    with self.writer.open(shard) as target:
      documents = self._documents(shard)
      for names, texts in _batches(documents):
        ids = self.tokenizer.encode_batch(texts)
        for name, text, tokens in zip(names, texts, ids):
          if tokens:
            target.add(tokens, len(text.encode()))
          else:
            target.skip(name, "empty")
    return self.size(shard)

  def size(self, shard: int) -> int:
    """Bytes of a shard's pieces."""
    return sum(piece.size for piece in self.groups[shard])

  def _documents(self, shard: int) -> Iterator[tuple[str, str]]:
    for piece in self.groups[shard]:
      for name, text in read_documents(piece, self.field):
        if self.keep is None or self.keep(name):
          yield name, text


def tokenize(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  *,
  split: str,
  field: str = "text",
  keep: Callable[[str], bool] | None = None,
  piece_bytes: int = PIECE_BYTES,
  workers: int = 1,
  notes: dict[str, Any] | None = None,
  progress: bool = True,
) -> dict[str, Any]:
  """Makes the token set out/split; continues where it was interrupted.

  Args:
    inputs: files or patterns, as `list_pieces` reads them.
    tokenizer: the tokenizer.
    out: folder of the splits, local or mounted.
    split: name of the set.
    field: of JSON objects and tables that is the text.
    keep: tells by its name whether a document is wanted; None takes all. It is
      pickled, and its repr is a setting of the set.
    piece_bytes: about the input of one shard.
    workers: processes; 1 is this one, which then encodes on all cores.
    notes: free entries of metadata.json.
    progress: show a progress bar on stderr.

  Returns:
    What metadata.json says.

  Raises:
    FileNotFoundError: an input is missing.
    OSError: a file cannot be read, or a shard not written.
    ValueError: an input is damaged, has no document that is wanted, or `out`
      holds a set of other settings.
  """
  if workers < 1:
    raise ValueError(f"workers={workers} must be at least 1")
  groups = list_pieces(inputs, piece_bytes)
  writer = TokenSetWriter(
    pathlib.Path(out) / split,
    tokenizer,
    num_shards=len(groups),
    settings={
      "inputs": fingerprint(groups),
      "field": field,
      "keep": "all" if keep is None else repr(keep),
    },
    notes=notes or {},
  )
  job = _Job(writer, groups, tokenizer, field, keep)
  todo = writer.todo()
  sizes = [job.size(shard) for shard in range(len(groups))]
  with tqdm.tqdm(
    desc=split,
    total=sum(sizes),
    initial=sum(sizes) - sum(sizes[shard] for shard in todo),
    unit="B",
    unit_scale=True,
    disable=not progress,
  ) as bar:
    for size in _write_all(job, todo, workers):
      bar.update(size)
  return writer.finish()


def tokenize_splits(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  *,
  held_out: float,
  **options: Any,
) -> dict[str, dict[str, Any]]:
  """Makes out/train and out/val, which share the documents.

  Args:
    inputs: as of `tokenize`.
    tokenizer: the tokenizer.
    out: folder of the splits.
    held_out: share of the documents in "val", by a hash of their names.
    **options: of `tokenize`.

  Returns:
    What metadata.json says, by split.

  Raises:
    FileNotFoundError: as `tokenize`.
    OSError: as `tokenize`.
    ValueError: as `tokenize`; or `held_out` is not a share.
  """
  # The small one first: whether it gets a document at all is known early.
  done = {
    split: tokenize(
      inputs,
      tokenizer,
      out,
      split=split,
      keep=HeldOutPart(held_out, split == "val"),
      **options,
    )
    for split in ("val", "train")
  }
  return {"train": done["train"], "val": done["val"]}


def _batches(
  documents: Iterable[tuple[str, str]],
) -> Iterator[tuple[list[str], list[str]]]:
  names: list[str] = []
  texts: list[str] = []
  size = 0
  for name, text in documents:
    names.append(name)
    texts.append(text)
    size += len(text)
    if len(names) == _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
      yield names, texts
      names, texts, size = [], [], 0
  if names:
    yield names, texts


def _write_all(job: _Job, todo: list[int], workers: int) -> Iterator[int]:
  workers = min(workers, len(todo))
  if workers <= 1:
    yield from map(job.write, todo)
    return
  pool = concurrent.futures.ProcessPoolExecutor(
    workers,
    multiprocessing.get_context("spawn"),
    initializer=_start_worker,
    initargs=(job,),
  )
  try:
    shards = [pool.submit(_write_shard, shard) for shard in todo]
    for shard in concurrent.futures.as_completed(shards):
      yield shard.result()
  except concurrent.futures.BrokenExecutor as error:
    raise OSError(
      f"a process that tokenizes ended ({error}), perhaps for lack of memory; "
      "finished shards are whole: run the same command again, with fewer "
      "workers"
    ) from error
  finally:
    pool.shutdown(cancel_futures=True)


_worker_job: list[_Job] = []  # of a worker process


def _start_worker(job: _Job):
  # The processes are the parallel part; each would start threads of its own.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _worker_job[:] = [job]
  parent = multiprocessing.parent_process()
  watch = functools.partial(_leave_with, parent)
  threading.Thread(target=watch, daemon=True).start()


def _leave_with(parent):
  """Ends this process where the one that started it was killed."""
  parent.join()
  os._exit(1)


def _write_shard(shard: int) -> int:
  return _worker_job[0].write(shard)
