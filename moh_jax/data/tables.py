"""Images in Parquet or Arrow files on disk, as Hugging Face publishes them.

A row holds an image's bytes, as {"bytes", "path"} or as a column of bytes, and
its label, as the library `datasets` writes them; `datasets` is not needed.

Any row can be read. Of a Parquet file its whole row group is read for it (often
100 rows; 10 MB took 2.7 ms of one core), and the last groups are kept, so rows
in order are quick and random ones are not; `prepare pack-images` makes shards
of them. Arrow files are mapped into memory.
"""

import bisect
import functools
import itertools
import json
import pathlib
import re
from typing import Any

import numpy as np

from moh_jax.config.registry import MissingSplitError
from moh_jax.data import sources
from moh_jax.data.files import (
  TABLES,
  files_by_split,
  fingerprint_of,
  import_extra,
)
from moh_jax.data.sources import ALL, EncodedSource, Record, Selection

_LABELS = ("label", "labels", "class", "target")  # usual names of the column
_IMAGE = re.compile("(large_)?binary|struct<bytes: ")  # a column's type
_KEPT_GROUPS = 8  # row groups of Parquet that a process keeps


class TableSource(EncodedSource):
  """Source of the images in the tables of a split, see `find_tables`."""

  def __init__(
    self, path: str, split: str, channels: int, selection: Selection = ALL
  ):
    """Reads the heads of a split's files, and all labels.

    Args:
      path: local folder of the tables.
      split: "train" or "val".
      channels: 1 converts to grey, 3 to RGB.
      selection: of the images; of a share that is held out a hash of file and
        row decides.

    Raises:
      MissingSplitError: there is no table of that split.
      ValueError: a file is damaged, or has no images, other columns or labels
        without a class; pyarrow is missing.
    """
    found = find_tables(path)
    divided = "val" not in found and selection.val_share > 0
    names = found.get("train" if divided else split, [])
    if not names:
      raise MissingSplitError(
        f"data.path={path!r} holds no Parquet or Arrow file of {split!r}, such "
        f"as {split}-0.parquet"
      )
    self._root, self.channels, self._names = pathlib.Path(path), channels, names
    files = [str(self._root / name) for name in names]
    heads = [_read_head(file) for file in files]
    # The first row of each file, and in each file that of each row group.
    self._groups = [[0, *itertools.accumulate(counts)] for _, counts in heads]
    self._starts = [0, *itertools.accumulate(x[-1] for x in self._groups)]
    self._image, label, self.class_names = _find_columns(
      heads[0][0], files[0], selection.label_column
    )
    self._labels = np.zeros(self._starts[-1], np.int32)
    if label:
      columns = [_read_column(file, label) for file in files]
      self._labels, self.class_names = _to_labels(
        columns, self.class_names, f"{path}: column {label!r}"
      )
    self._rows = np.arange(len(self._labels))
    if divided:
      rows = [self._row_name(row) for row in self._rows]
      labels, share = self._labels.tolist(), selection.val_share
      chosen = sources.hold_out(rows, labels, split, share, path)
      self._rows = np.array(chosen)
    if selection.class_names:
      self.class_names, mapped = sources.match_classes(
        self.class_names, selection.class_names, path
      )
      self._labels = np.array(mapped, np.int32)[self._labels]

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def fingerprint(self) -> str:
    """Identifies the files, the rows that are taken of them, and labels."""
    taken = self._rows.tobytes() + self._labels.tobytes()
    found = fingerprint_of(self._root, self._names, taken)
    return f"{len(self)} rows, xxh3 {found}"

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    row = int(self._rows[index])
    name, in_file, group, in_group = self._place(row)
    column = _read_column(str(self._root / name), self._image, group)
    content = column[in_group].as_py()
    if isinstance(content, dict):
      content = content["bytes"]
    place = f"{self._root}/{name}:{in_file + 1}"
    if content is None:
      raise ValueError(f"{place}: the row has no bytes of an image")
    return Record(int(self._labels[row]), place, content)

  def name(self, index: int) -> str:
    """File and number of the row from 1: "data/train-0.parquet:7"."""
    return self._row_name(int(self._rows[index]))

  def _row_name(self, row: int) -> str:
    name, in_file, *_ = self._place(row)
    return f"{name}:{in_file + 1}"

  def _place(self, row: int) -> tuple[str, int, int, int]:
    """The file of a row, its place there, its row group, its place in that."""
    file = bisect.bisect_right(self._starts, row) - 1
    row -= self._starts[file]
    groups = self._groups[file]
    group = bisect.bisect_right(groups, row) - 1
    return self._names[file], row, group, row - groups[group]


def find_tables(root: str | pathlib.Path) -> dict[str, list[str]]:
  """Finds the tables in a folder and all below it, by split.

  The name of a file, else of the folder nearest to it, tells the split, as in
  data/train-00000-of-00002.parquet or validation/0.parquet. Where none does,
  all are "train"; without "val" the "test" split stands for it. What is hidden,
  a cache of `datasets`, or metadata.parquet is left out.

  Args:
    root: local folder.

  Returns:
    Paths below `root` of the files of "train", "val" or both, in order; empty
    where there is no table.

  Raises:
    ValueError: some files tell a split and others do not.
  """
  found = files_by_split(root, TABLES)
  if found[""] and len(found) > 1:
    raise ValueError(f"{root}: {found[''][0]!r} names no split, others do")
  splits = {"train": found["train"] or found[""], "val": found["val"]}
  return {split: names for split, names in splits.items() if names}


def _find_columns(
  schema: Any, file: str, label: str
) -> tuple[str, str, sources.Names]:
  """Finds the columns of images and labels.

  Args:
    schema: of pyarrow, with the notes that `datasets` leaves in it.
    file: for messages.
    label: name of the column of labels; "" takes the only one of classes, else
      one that is called "label" or the like.

  Returns:
    The columns of images and of labels, "" makes all images one class, and the
    names of the classes, () where the schema has none.

  Raises:
    ValueError: there is none, or not only one.
  """
  notes = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
  features = notes.get("info", {}).get("features", {})
  features = {n: x for n, x in features.items() if isinstance(x, dict)}  # lists

  def of_kind(kind: str) -> list[str]:
    found = {n for n, x in features.items() if x.get("_type") == kind}
    return [name for name in schema.names if name in found]

  images = of_kind("Image") or [
    field.name for field in schema if _IMAGE.match(str(field.type))
  ]
  labels = of_kind("ClassLabel") or [n for n in schema.names if n in _LABELS]
  labels = [label] if label else labels
  if len(images) != 1 or len(labels) > 1 or {*labels} - {*schema.names}:
    raise ValueError(
      f"{file}: must have one column of images and one of labels (or "
      f"data.label_column), found {images} and {labels} among {schema.names}"
    )
  if not labels:
    return images[0], "", (sources.FLAT_CLASS,)
  names = features.get(labels[0], {}).get("names") or ()
  return images[0], labels[0], tuple(names)


def _to_labels(
  columns: list[Any], names: sources.Names, where: str
) -> tuple[np.ndarray, sources.Names]:
  """The label of every row, and the names of the classes.

  Raises:
    ValueError: a row has no label, or one without a class.
  """
  values = np.concatenate([column.to_numpy() for column in columns])
  has_all = not any(column.null_count for column in columns)
  if values.dtype == object and has_all:
    classes, values = np.unique(values.astype(str), return_inverse=True)
    names = tuple(map(str, classes))
  most = len(names) or np.inf
  if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= most:
    raise ValueError(
      f"{where} must be text, or from 0 to below {most}, in every row: {values}"
    )
  names = names or tuple(map(str, range(values.max() + 1)))
  return values.astype(np.int32), names


def _read_head(file: str) -> tuple[Any, list[int]]:
  """The schema of a file, and the rows of each row group; Arrow has one.

  Raises:
    ValueError: it is damaged, or pyarrow is missing.
  """
  table = _open(file)
  if file.lower().endswith(".arrow"):
    return table.schema, [table.num_rows]
  groups = map(table.metadata.row_group, range(table.num_row_groups))
  return table.schema_arrow, [group.num_rows for group in groups]


@functools.lru_cache(_KEPT_GROUPS)
def _read_column(file: str, column: str, group: int | None = None) -> Any:
  """Reads a column of a row group, None of all, as pyarrow's array.

  Raises:
    ValueError: the file is damaged, or has no such column.
  """
  table, columns = _open(file), [column]
  try:
    if not file.lower().endswith(".arrow"):
      groups = range(table.num_row_groups) if group is None else [group]
      table = table.read_row_groups(groups, columns=columns, use_threads=False)
    return table.column(column)
  except Exception as error:  # a damaged file raises nearly anything
    raise ValueError(f"{file}: column {column!r}: {error}") from error


def _open(file: str) -> Any:
  """A Parquet file, or the table of an Arrow file, mapped into memory."""
  parquet = import_extra("pyarrow.parquet", file, "images")
  pyarrow = import_extra("pyarrow", file, "images")
  try:
    if file.lower().endswith(".arrow"):
      return pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all()
    return parquet.ParquetFile(file)
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{file}: damaged or no table: {error}") from error
