"""Tokenizing text files into token sets, on several processes.

A shard depends on the files, the tokenizer and the options alone, so a run that
was killed continues, on any number of processes, to the same bytes. The input
is read once: a group of its pieces gives one shard of every split.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tqdm

from moh_jax.data.text.files import read_documents
from moh_jax.data.text.pieces import (
  Piece,
  file_format,
  fingerprint,
  list_pieces,
)
from moh_jax.data.text.token_set_writer import TokenSetWriter
from moh_jax.data.text.tokenizers import Tokenizer

PIECE_BYTES = 256 << 20
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


# Tells by its name whether a document is wanted; None takes all.
_Keep = Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class _Job:
  """What a process needs to write shards; picklable."""

  writers: dict[str, TokenSetWriter]
  keeps: Mapping[str, _Keep]
  groups: list[tuple[Piece, ...]]
  todo: dict[int, list[str]]  # the splits that lack a group's shard
  tokenizer: Tokenizer
  field: str

  def write(self, group: int) -> int:
    """Writes the shards of one group; returns the bytes of its pieces."""
    with contextlib.ExitStack() as stack:
      targets = {
        split: stack.enter_context(self.writers[split].open(group))
        for split in self.todo[group]
      }
      for names, texts in _batches(self._documents(group)):
        ids = self.tokenizer.encode_batch(texts)
        for name, text, tokens in zip(names, texts, ids):
          for split, target in targets.items():
            if not _wanted(self.keeps[split], name):
              continue
            if tokens:
              target.add(tokens, len(text.encode()))
            else:
              target.skip(name, "empty")
    return self.size(group)

  def size(self, group: int) -> int:
    """Bytes of a group's pieces."""
    return sum(piece.size for piece in self.groups[group])

  def _documents(self, group: int) -> Iterator[tuple[str, str]]:
    keeps = [self.keeps[split] for split in self.todo[group]]
    for piece in self.groups[group]:
      for name, text in read_documents(piece, self.field):
        if any(_wanted(keep, name) for keep in keeps):
          yield name, text


def tokenize(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  *,
  split: str,
  keep: Callable[[str], bool] | None = None,
  **options: Any,
) -> dict[str, Any]:
  """Makes the token set out/split; continues where it was interrupted.

  Args:
    inputs: files or patterns, as `list_pieces` reads them.
    tokenizer: the tokenizer.
    out: folder of the splits, local or mounted.
    split: name of the set.
    keep: tells by its name whether a document is wanted; None takes all. It is
      pickled, and its repr is a setting of the set.
    **options: of `tokenize_parts`.

  Returns:
    What metadata.json says.

  Raises:
    FileNotFoundError: an input is missing.
    OSError: a file cannot be read, or a shard not written.
    ValueError: an input is damaged, has no document that is wanted, or `out`
      holds a set of other settings.
  """
  return tokenize_parts(inputs, tokenizer, out, {split: keep}, **options)[split]


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
    **options: of `tokenize_parts`.

  Returns:
    What metadata.json says, by split.

  Raises:
    FileNotFoundError: as `tokenize`.
    OSError: as `tokenize`.
    ValueError: as `tokenize`; or `held_out` is not a share.
  """
  parts = {
    split: HeldOutPart(held_out, split == "val") for split in ("train", "val")
  }
  return tokenize_parts(inputs, tokenizer, out, parts, **options)


def tokenize_parts(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  parts: Mapping[str, _Keep],
  *,
  field: str = "text",
  piece_bytes: int = PIECE_BYTES,
  workers: int = 1,
  notes: dict[str, Any] | None = None,
  progress: bool = True,
) -> dict[str, dict[str, Any]]:
  """Makes several sets of one reading; continues where it was interrupted.

  A set of which no shard could be written is removed again, so other options
  may be tried. So are all of them if one has no document; of plain text, where
  the names of the files tell, that is known before anything is read.

  Args:
    inputs: as of `tokenize`.
    tokenizer: the tokenizer.
    out: folder of the splits.
    parts: `keep` of `tokenize` by split.
    field: of JSON objects and tables that is the text.
    piece_bytes: about the input of one shard.
    workers: processes; 1 is this one, which then encodes on all cores.
    notes: free entries of metadata.json.
    progress: show a progress bar on stderr.

  Returns:
    What metadata.json says, by split.

  Raises:
    FileNotFoundError: as `tokenize`.
    OSError: as `tokenize`.
    ValueError: as `tokenize`.
  """
  if workers < 1:
    raise ValueError(f"workers={workers} must be at least 1")
  groups = list_pieces(inputs, piece_bytes)
  out = pathlib.Path(out)
  pieces = [piece for group in groups for piece in group]
  if all(file_format(piece.file)[0] == "text" for piece in pieces):
    for split, keep in parts.items():
      if not any(_wanted(keep, piece.name) for piece in pieces):
        raise _no_document(out / split, keep)
  writers: dict[str, TokenSetWriter] = {}
  try:
    for split, keep in parts.items():
      writers[split] = TokenSetWriter(
        out / split,
        tokenizer,
        num_shards=len(groups),
        settings={
          "inputs": fingerprint(groups),
          "field": field,
          "keep": "all" if keep is None else repr(keep),
        },
        notes=notes or {},
      )
    todo: dict[int, list[str]] = {}
    for split, writer in writers.items():
      for group in writer.todo():
        todo.setdefault(group, []).append(split)
    job = _Job(writers, parts, groups, todo, tokenizer, field)
    _run(job, workers, progress)
  except (OSError, ValueError):
    for writer in writers.values():
      if len(writer.todo()) == len(groups):
        writer.discard()
    raise
  for split, writer in writers.items():
    if not writer.documents():
      for other in writers.values():
        other.discard()
      raise _no_document(out / split, parts[split])
  return {split: writer.finish() for split, writer in writers.items()}


def _wanted(keep: _Keep, name: str) -> bool:
  return keep is None or keep(name)


def _no_document(folder: pathlib.Path, keep: _Keep) -> ValueError:
  reason = f"{folder}: the input has no document for it"
  if isinstance(keep, HeldOutPart):
    other = "larger" if keep.held_out else "smaller"
    reason += (
      f"; give a {other} --held-out than {keep.share}, or files of its own "
      f"with --split={folder.name}"
    )
  return ValueError(reason)


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


def _run(job: _Job, workers: int, progress: bool):
  """Writes all that is left."""
  total = sum(map(job.size, range(len(job.groups))))
  with tqdm.tqdm(
    desc=", ".join(job.writers),
    total=total,
    initial=total - sum(map(job.size, job.todo)),
    unit="B",
    unit_scale=True,
    disable=not progress,
  ) as bar:
    for size in _write_all(job, sorted(job.todo), workers):
      bar.update(size)


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
    groups = [pool.submit(_write_group, group) for group in todo]
    for group in concurrent.futures.as_completed(groups):
      yield group.result()
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


def _write_group(group: int) -> int:
  return _worker_job[0].write(group)
