"""Tokenizes text files into sets of tokens, on several processes.

A shard depends on the files, the tokenizer and the options alone, so a killed
run can continue on any number of processes and ends with the same bytes. The
input is read once: each group of its pieces makes one shard of every split.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tqdm

from moh_jax.data.shard_writer import describe_skipped
from moh_jax.data.text_files import (
  PIECE_BYTES,
  OnError,
  Piece,
  count_or_stop,
  fingerprint,
  list_pieces,
  read_documents,
  skip_or_stop,
)
from moh_jax.data.token_sets import TokenSetWriter
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.runtime.files import inside

# A batch for one call of the tokenizer, large enough for all its threads.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 20


# Returns whether a document is kept, by its text; None keeps all.
_Keep = Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class HeldOutPart:
  """Chooses the documents of a held-out part, or the rest, by their text.

  A hash of the text decides, so the choice depends on nothing else: not on the
  name or place of a file, nor on what other documents there are. Documents of
  the same text are in the same part.

  Attributes:
    share: share of the documents in the held-out part, in (0, 1).
    held_out: whether to choose the held-out part; False chooses the rest.

  Raises:
    ValueError: `share` is out of range.
  """

  share: float
  held_out: bool

  def __post_init__(self):
    if not 0 < self.share < 1:
      raise ValueError(f"held_out={self.share} must be between 0 and 1")

  def __call__(self, text: str) -> bool:
    """Returns whether the document `text` belongs to the part."""
    return (_number(text) < self.share) == self.held_out


def held_out_parts(share: float) -> dict[str, HeldOutPart]:
  """Divides documents among "train" and "val", which gets `share` of them.

  Raises:
    ValueError: `share` is not between 0 and 1.
  """
  return {"train": HeldOutPart(share, False), "val": HeldOutPart(share, True)}


def fill_parts(
  parts: Mapping[str, Any], texts: Iterable[str]
) -> dict[str, Any]:
  """Gives each of two parts a document where the share leaves one empty.

  The share moves just past the lowest or the highest number of a text. Where
  the hash gives both parts a document, nothing changes, and no more texts are
  taken than needed to see it.

  Args:
    parts: by split; others than `held_out_parts` makes are returned as given.
    texts: the documents that have text.

  Raises:
    ValueError: there are fewer than two documents, or all have the same text.
  """
  share = getattr(parts.get("val"), "share", None)
  if share is None or parts != held_out_parts(share):
    return dict(parts)
  low, high, count = 1.0, 0.0, 0
  for number in map(_number, texts):
    low, high, count = min(low, number), max(high, number), count + 1
    if low < share <= high:
      return dict(parts)
  if not count:
    raise ValueError("the input has no document")
  if low == high:
    same = "document" if count == 1 else "documents, all of one text"
    raise ValueError(
      f"the input has {count} {same}, and documents are not cut; tokenize "
      "other files with --split val, and this one with --split train"
    )
  return held_out_parts(high if low < share else math.nextafter(low, 1))


def _number(text: str) -> float:
  """A number in [0, 1) that a text has by its hash."""
  content = text.encode(errors="surrogateescape")
  # A hash of our own: the texts may be what another hash of them chose.
  digest = hashlib.blake2b(content, digest_size=8, person=b"moh_jax").digest()
  return int.from_bytes(digest, "little") / 2**64


@dataclasses.dataclass(frozen=True)
class _Job:
  """What a worker process needs to write shards; picklable."""

  writers: dict[str, TokenSetWriter]  # by split
  keeps: Mapping[str, _Keep]  # by split
  groups: list[tuple[Piece, ...]]
  todo: dict[int, list[str]]  # number of a group -> splits that lack its shard
  tokenizer: Tokenizer
  field: str
  on_error: OnError

  def write(self, group: int) -> int:
    """Writes the missing shards of a group; returns the bytes it read."""
    with contextlib.ExitStack() as stack:
      targets = {
        split: stack.enter_context(self.writers[split].open(group))
        for split in self.todo[group]
      }

      def skip(
        name: str, reason: str, detail: str = "", text: str = ""
      ) -> None:
        for split, target in targets.items():
          # Without text, the name says which part tells of it.
          if _wanted(self.keeps[split], text or name):
            target.skip(name, reason, detail)

      on_bad = skip_or_stop(self.on_error, skip)
      documents = (
        (name, text)
        for piece in self.groups[group]
        for name, text in read_documents(piece, self.field, on_bad)
        if not text
        or any(_wanted(self.keeps[split], text) for split in targets)
      )
      for names, texts in _batches(documents):
        ids = self.tokenizer.encode_batch(texts)
        for name, text, tokens in zip(names, texts, ids):
          if not tokens:
            skip(name, "empty", text=text)
            continue
          for split, target in targets.items():
            if _wanted(self.keeps[split], text):
              target.add(tokens, len(text.encode()))
    return self.size(group)

  def size(self, group: int) -> int:
    """Bytes of the pieces of a group."""
    return sum(piece.size for piece in self.groups[group])


def tokenize(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  parts: Mapping[str, _Keep],
  *,
  field: str = "text",
  piece_bytes: int = PIECE_BYTES,
  workers: int = 1,
  on_error: OnError = "stop",
  notes: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
  """Makes the sets OUT/SPLIT, reading the input once; continues killed runs.

  If no shard of a set can be written, the set is removed again, so that other
  options can be tried. If a set has no document, all of them are removed. Where
  `parts` are those of `held_out_parts` and the share leaves one of them empty,
  it gets one document, see `fill_parts`; that is known before the work starts.

  Args:
    inputs: files or patterns, see `list_pieces`.
    tokenizer: tokenizer that makes the tokens.
    out: folder of the splits, local or mounted.
    parts: for each split, a function from a document's text to whether it is
      kept; None keeps all, for example {"train": None}. The functions are
      pickled, and their repr is a setting of the set.
    field: field of JSON objects, or column of tables, that holds the text.
    piece_bytes: approximate bytes of input for one shard.
    workers: number of processes; 1 is this one, which encodes on all cores.
    on_error: "skip" lists lines, rows and files that hold no text in
      OUT/SPLIT/skipped/, and goes on; a run that was stopped by one may be
      continued so.
    notes: any JSON values, stored in metadata.json.

  Returns:
    The content of metadata.json by split.

  Raises:
    FileNotFoundError: an input is missing.
    OSError: a file cannot be read, or a shard not be written.
    ValueError: an input is damaged and `on_error` is "stop", a split gets no
      document, or `out` holds sets with other settings.
  """
  groups = list_pieces(inputs, piece_bytes)
  out = pathlib.Path(out)
  for split in parts:
    inside(out, split, "split")
  parts = fill_parts(parts, _texts(groups, field, on_error))
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
          # Older versions asked `keep` for the name.
          "keep": "all" if keep is None else f"{keep!r} of texts",
        },
        notes=notes or {},
      )
    todo: dict[int, list[str]] = {}
    for split, writer in writers.items():
      for group in writer.todo():
        todo.setdefault(group, []).append(split)
    job = _Job(writers, parts, groups, todo, tokenizer, field, on_error)
    total = sum(map(job.size, range(len(groups))))
    with tqdm.tqdm(
      desc=", ".join(writers),
      total=total,
      initial=total - sum(map(job.size, todo)),
      unit="B",
      unit_scale=True,
      disable=None,  # where stderr is no terminal
    ) as bar:
      for size in _write_all(job, sorted(todo), workers):
        bar.update(size)
  except (OSError, ValueError):
    for writer in writers.values():
      if len(writer.todo()) == len(groups):
        writer.discard()
    raise
  for split, writer in writers.items():
    if not writer.documents():
      skipped = describe_skipped(writer.entries())
      for other in writers.values():
        other.discard()
      raise ValueError(
        f"{out / split}: the input has no document for it"
        + (f"; {skipped}" if skipped else "")
      )
  return {split: writer.finish() for split, writer in writers.items()}


def _wanted(keep: _Keep, text: str) -> bool:
  return keep is None or keep(text)


def _texts(
  groups: Iterable[Iterable[Piece]], field: str, on_error: OnError
) -> Iterator[str]:
  """The documents that have text."""
  skipped: collections.Counter[str] = collections.Counter()
  on_bad = count_or_stop(on_error, skipped)
  is_empty = True
  for piece in itertools.chain.from_iterable(groups):
    for _, text in read_documents(piece, field, on_bad):
      if text:
        is_empty = False
        yield text
  if is_empty and skipped:
    told = describe_skipped([{"skipped": skipped}])
    raise ValueError(f"the input has no document; {told}")


def _batches(
  documents: Iterable[tuple[str, str]],
) -> Iterator[tuple[list[str], list[str]]]:
  """Collects (name, text) pairs into batches of names and texts."""
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
  """Writes groups on several processes; yields the bytes of each when done."""
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


_worker_job: list[_Job] = []  # the job of this process, if it is a worker


def _start_worker(job: _Job):
  # There is a process for each core, so the tokenizer needs no threads.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _worker_job[:] = [job]
  parent = multiprocessing.parent_process()
  watch = functools.partial(_exit_after, parent)
  threading.Thread(target=watch, daemon=True).start()


def _exit_after(parent):
  """Ends this process when the process that started it was killed."""
  parent.join()
  os._exit(1)


def _write_group(group: int) -> int:
  return _worker_job[0].write(group)
