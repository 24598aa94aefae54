"""Tokenizes text files into sets of tokens, on several processes.

A shard depends on the files, the tokenizer and the options alone, so a killed
run can continue on any number of processes and ends with the same bytes. The
input is read once: each group of its pieces makes one shard of every split.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import math
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import tqdm

from moh_jax.config.registry import SPLITS
from moh_jax.data import text_files
from moh_jax.data.token_sets import TokenSetWriter, TokenShard
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.runtime.files import inside

# Documents, and about characters, for one call of the tokenizer, on all its
# threads.
_BATCH, _BATCH_TEXT = 64, 1 << 20


def split_of(text: str, held_out: float) -> str:
  """The part of a document, "train" or "val", by its text.

  A hash of the text decides, so the choice depends on nothing else: not on the
  name or place of a file, nor on what other documents there are. Documents of
  the same text are in the same part.

  Args:
    text: of the document.
    held_out: share of the documents in "val", in (0, 1).
  """
  return "val" if _number(text) < held_out else "train"


def cut_tail(text: str, held_out: float) -> tuple[str, ...]:
  """A text without its last lines, and these; () where it is one line."""
  place = text.rfind("\n", 0, int(len(text) * (1 - held_out))) + 1
  place = place or text.find("\n") + 1
  return (text[:place], text[place:]) if 0 < place < len(text) else ()


def fill_parts(
  held_out: float, texts: Iterable[str], skipped: collections.Counter[str]
) -> tuple[float, bool]:
  """The share that gives each part a document, where the given one does not.

  It moves just past the lowest or the highest number of a text. Where the hash
  gives both parts a document, nothing changes, and no more texts are taken than
  needed to see it.

  Args:
    held_out: see `split_of`.
    texts: the documents that have text.
    skipped: what is left out of them by reason, for the message.

  Returns:
    The share, and whether it is that of the last lines of the only document.

  Raises:
    ValueError: there is no document, or one line alone, or all have the same
      text.
  """
  low, high, count = 1.0, 0.0, 0
  for text in texts:
    number = _number(text)
    low, high, count = min(low, number), max(high, number), count + 1
    if low < held_out <= high:
      return held_out, False
  if not count:
    raise ValueError(
      f"the input has no document; {skipped.total()} lines or files are no text"
    )
  if count == 1 and cut_tail(text, held_out):
    return held_out, True
  if low == high:
    same = (
      "document of one line" if count == 1 else "documents, all of one text"
    )
    raise ValueError(
      f"the input has {count} {same}; tokenize other files with --split val, "
      "and this one with --split train"
    )
  return (high if low < held_out else math.nextafter(low, 1)), False


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
  held_out: float | None
  cuts: bool  # hold out the last lines of the only document
  groups: list[tuple[text_files.Piece, ...]]
  todo: dict[int, list[str]]  # number of a group -> splits that lack its shard
  tokenizer: Tokenizer
  field: str
  on_error: str

  def write(self, group: int) -> int:
    """Writes the missing shards of a group; returns the bytes it read."""
    with contextlib.ExitStack() as stack:
      targets = {
        split: stack.enter_context(self.writers[split].open(group))
        for split in self.todo[group]
      }

      def target(text: str) -> TokenShard | None:
        if self.held_out is None:
          return next(iter(targets.values()))
        return targets.get(split_of(text, self.held_out))

      def documents() -> Iterator[tuple[TokenShard, str, str]]:
        for piece in self.groups[group]:
          for name, text in text_files.read_documents(piece, self.field):
            if isinstance(text, str):
              # Without text, the name says the part.
              parts = [(target(text or name), text)]
              if self.cuts and text:
                parts = zip(
                  map(targets.get, SPLITS), cut_tail(text, self.held_out)
                )
              yield from ((found, name, x) for found, x in parts if found)
            elif self.on_error == "stop" or text.is_damage:
              raise text
            elif found := target(name):
              found.skip(f"{name}: {text.reason}{text.detail}")

      for batch in _batches(documents()):
        try:
          ids = self.tokenizer.encode_batch([text for *_, text in batch])
        except ValueError as error:
          where = f"in the texts {batch[0][1]} to {batch[-1][1]}"
          raise ValueError(f"{error}, {where}") from error
        for (found, name, text), tokens in zip(batch, ids):
          if tokens:
            found.add(tokens, len(text.encode()))
          else:
            found.skip(f"{name}: empty")
    return self.size(group)

  def size(self, group: int) -> int:
    """Bytes of the pieces of a group."""
    return sum(piece.size for piece in self.groups[group])


def _batches(documents: Iterable[tuple[Any, str, str]]) -> Iterator[list]:
  """Shards, names and texts, as many as one call of the tokenizer takes."""
  batch, size = [], 0
  for document in documents:
    batch.append(document)
    size += len(document[-1])
    if len(batch) == _BATCH or size >= _BATCH_TEXT:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def tokenize(
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  out: str | os.PathLike,
  split: str = "train",
  *,
  held_out: float | None = None,
  field: str = "text",
  piece_bytes: int = text_files.PIECE_BYTES,
  workers: int = 1,
  on_error: Literal["stop", "skip"] = "stop",
  notes: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
  """Makes sets OUT/SPLIT, reading the input once; continues killed runs.

  If no shard of a set can be written, the set is removed again, so that other
  options can be tried. If a set has no document, all of them are removed. Where
  the share leaves one of two parts empty, it gets one document, and of one
  document the last lines are held out, see `fill_parts`; that is known before
  the work starts.

  Args:
    inputs: files or patterns, see `list_pieces`.
    tokenizer: tokenizer that makes the tokens.
    out: folder of the splits, local or mounted.
    split: name of the set that all documents go to.
    held_out: makes two sets in its place, "train" and "val", which gets this
      share of the documents, see `split_of`.
    field: field of JSON objects, or column of tables, that holds the text.
    piece_bytes: approximate bytes of input for one shard.
    workers: number of processes; 1 is this one, which encodes on all cores.
    on_error: "skip" lists lines, rows and files that hold no text in
      OUT/SPLIT/skipped.txt, and goes on; a run that was stopped by one may be
      continued so. A damaged file ends the run in any case.
    notes: any JSON values, stored in metadata.json.

  Returns:
    The content of metadata.json by split.

  Raises:
    FileNotFoundError: an input is missing.
    OSError: a file cannot be read, or a shard not be written.
    ValueError: an input is damaged, or holds no text and `on_error` is "stop",
      a split gets no document, or `out` holds sets with other settings.
  """
  groups, out = text_files.list_pieces(inputs, piece_bytes), pathlib.Path(out)
  inside(out, split, "split")
  keeps, cuts = {split: "all"}, False
  if held_out is not None:
    skipped: collections.Counter[str] = collections.Counter()
    counts = skipped if on_error == "skip" else None
    texts = text_files.read_texts(itertools.chain(*groups), field, counts)
    held_out, cuts = fill_parts(held_out, filter(None, texts), skipped)
    # Sets say it as versions did that had a class for it.
    name = f"HeldOutPart(share={held_out!r}, held_out="
    parts = {"train": False, "val": True}
    what = "lines" if cuts else "texts"
    keeps = {part: f"{name}{of}) of {what}" for part, of in parts.items()}
  writers: dict[str, TokenSetWriter] = {}
  settings = {"inputs": text_files.fingerprint(groups), "field": field}
  options = {"num_shards": len(groups), "notes": notes or {}}
  for part, keep in keeps.items():
    options["settings"] = {**settings, "keep": keep}
    writers[part] = TokenSetWriter(out / part, tokenizer, **options)
  todo: dict[int, list[str]] = {}
  for split, writer in writers.items():
    for group in writer.todo():
      todo.setdefault(group, []).append(split)
  job = _Job(writers, held_out, cuts, groups, todo, tokenizer, field, on_error)
  with tqdm.tqdm(
    desc=", ".join(writers),
    total=sum(map(job.size, todo)),
    unit="B",
    unit_scale=True,
    disable=None,  # where stderr is no terminal
  ) as bar:
    for size in _write_all(job, sorted(todo), workers):
      bar.update(size)
  for split, writer in writers.items():
    if not any(entry["documents"] for entry in writer.entries()):
      raise ValueError(f"{out / split}: the input has no document for it")
  return {split: writer.finish() for split, writer in writers.items()}


def _write_all(job: _Job, todo: list[int], workers: int) -> Iterator[int]:
  """Writes groups on several processes; yields the bytes of each when done."""
  workers = min(workers, len(todo))
  if workers <= 1:
    yield from map(job.write, todo)
    return
  try:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
      workers, spawn, _start_worker, (job,)
    ) as pool:
      groups = [pool.submit(_write_group, group) for group in todo]
      for group in concurrent.futures.as_completed(groups):
        yield group.result()
  except concurrent.futures.BrokenExecutor as error:
    raise OSError(
      f"a process that tokenizes ended ({error}), perhaps for lack of memory; "
      "finished shards are whole: run the same command again, with fewer "
      "workers"
    ) from error


_worker_job: list[_Job] = []  # the job of this process, if it is a worker


def _start_worker(job: _Job):
  def end_with_parent() -> None:  # which may be killed
    multiprocessing.parent_process().join()
    os._exit(1)

  threading.Thread(target=end_with_parent, daemon=True).start()
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says it
  # There is a process for each core, so the tokenizer needs no threads.
  os.environ["TOKENIZERS_PARALLELISM"] = "false"
  _worker_job[:] = [job]


def _write_group(group: int) -> int:
  return _worker_job[0].write(group)
