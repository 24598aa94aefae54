"""Images in Parquet or Arrow files on disk, as Hugging Face publishes them.

A row holds an image's bytes, as {"bytes", "path"} or as a column of bytes, and
its label, as the library `datasets` writes them; `datasets` is not needed.

Any row can be read. Of a Parquet file its whole row group is read for it (often
100 rows), and the last groups are kept, so rows in order are quick and random
ones are not; `pack-images` makes shards of them. Arrow files are mapped into
memory.
"""

import bisect
import collections
import dataclasses
import itertools
import logging
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import xxhash

from moh_jax.config.registry import MissingSplitError
from moh_jax.data.identity import Identity, of_shards
from moh_jax.data.image_folders import (
  FLAT_CLASS,
  SPLIT_WORDS,
  EncodedSource,
  Record,
  has_class_images,
  hold_out,
)
from moh_jax.data.input_files import (
  import_extra,
  list_files,
  open_arrow,
  open_parquet,
)
from moh_jax.data.sources import ClassList, SharedReads, match_classes
from moh_jax.runtime.json_files import parse_json

_LOG = logging.getLogger(__name__)
_LARGE_GROUP = 1 << 26  # bytes; 10 MB took 2.7 ms of one core for one image
_MOST_CLASSES = 1 << 20
_KEPT_BYTES = 1 << 28  # of row groups that a process keeps
_SUFFIXES = (".parquet", ".arrow")
_WORD = re.compile(r"(?<![a-z])(" + "|".join(SPLIT_WORDS) + r")(?![a-z])")
_LABELS = ("label", "labels", "class", "target")  # usual names of the column
_MOST_SCHEMA = 1 << 26  # bytes that a schema's notes may have


class _Feature(msgspec.Struct):
  kind: str = msgspec.field(name="_type", default="")
  names: list[str] | None = None


class _Info(msgspec.Struct):
  features: dict[str, Any] = {}


class _Notes(msgspec.Struct):
  info: _Info = msgspec.field(default_factory=_Info)


@dataclasses.dataclass(frozen=True)
class _Columns:
  """Which columns hold images and labels.

  Attributes:
    image: name of the column of images.
    label: name of the column of labels; "" makes all images one class.
    class_names: of the labels, in order; () where the schema names none.
  """

  image: str
  label: str
  class_names: tuple[str, ...]

  @property
  def names(self) -> list[str]:
    """The columns to read."""
    return [self.image] + [self.label] * bool(self.label)


@dataclasses.dataclass(frozen=True)
class _Head:
  """What the head of a file says.

  Attributes:
    file: its path.
    schema: of pyarrow.
    rows: number of rows of each row group; an Arrow file, which is mapped into
      memory, is one group.
    group_bytes: size of its largest row group.
  """

  file: str
  schema: Any
  rows: tuple[int, ...]
  group_bytes: int


class ParquetSource(EncodedSource):
  """Source of the images in the tables of a split, see `find_tables`."""

  def __init__(
    self,
    path: str,
    split: str,
    channels: int,
    *,
    val_share: float = 0.0,
    class_names: tuple[str, ...] | ClassList = (),
    label_column: str = "",
  ):
    """Reads the heads of a split's files.

    Args:
      path: local folder of the tables.
      split: "train" or "val".
      channels: 1 converts to grey, 3 to RGB.
      val_share: share of the rows that is held out where no file is; a hash of
        file and row decides.
      class_names: classes whose positions are the labels; () takes those that
        the files name, else the labels themselves.
      label_column: column of the labels; "" finds it.

    Raises:
      MissingSplitError: there is no table of that split.
      FileNotFoundError: its tables have no rows.
      ValueError: a file is damaged, or has no images, other columns or labels
        without a class; pyarrow is missing.
    """
    found = find_tables(path)
    divided = "val" not in found and val_share > 0
    self._names = found.get("train" if divided else split, [])
    if not self._names:
      raise MissingSplitError(
        f"data.path={path!r} holds no Parquet or Arrow file of {split!r}; "
        f"expected such as {path}/{split}-0.parquet or {path}/{split}/0.parquet"
      )
    self._root, self.channels = pathlib.Path(path), channels
    heads = [_read_head(str(self._root / name)) for name in self._names]
    first = heads[0]
    self._columns = _find_columns(first.schema, first.file, label_column)
    self._check_heads(heads)
    self._file_rows = [sum(head.rows) for head in heads]
    # (number of the file, of the group in it), and the rows up to its end.
    self._groups = [
      (number, group)
      for number, head in enumerate(heads)
      for group in range(len(head.rows))
    ]
    rows = (rows for head in heads for rows in head.rows)
    self._ends = list(itertools.accumulate(rows))
    self._starts = [0, *itertools.accumulate(self._file_rows)]
    self._read_groups = SharedReads(_KEPT_BYTES, _kept_bytes)
    if not any(self._file_rows):
      raise FileNotFoundError(f"data.path={path!r}: its tables have no rows")
    self._labels, self.class_names = self._read_labels()
    self._rows, self._held_out = np.arange(len(self._labels)), ""
    if divided:
      names = [self._row_name(row) for row in self._rows]
      known = self._labels.tolist(), split, val_share, self.class_names
      self._rows = np.array(hold_out(names, *known, self._root))
      self._held_out = f"{val_share:g}"
    if class_names:
      where = str(self._root)
      matched = match_classes(self.class_names, class_names, where)
      self.class_names, known = matched
      self._labels = np.array(known, np.int32)[self._labels]

  def __len__(self) -> int:
    return len(self._rows)

  def identity(self) -> Identity:
    """Identifies the files, in order, and the rows that are taken of them."""
    entries = [
      {
        "file": name,
        "examples": rows,
        "bytes": (self._root / name).stat().st_size,
      }
      for name, rows in zip(self._names, self._file_rows)
    ]
    found = of_shards(self._root, entries)
    labels = xxhash.xxh3_64_hexdigest(self._labels.tobytes())
    found |= {"examples": len(self), "labels": labels}
    return found | {"val_share": self._held_out} if self._held_out else found

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images, their labels and the classes."""
    known = f"{self.identity()} {self.class_names}"
    digest = xxhash.xxh3_64_hexdigest(known.encode(errors="surrogateescape"))
    return f"{len(self)} rows, xxh3 {digest}"

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    row = int(self._rows[index])
    place = bisect.bisect_right(self._ends, row)
    number, group = self._groups[place]
    file = str(self._root / self._names[number])
    table = self._read_groups.get(
      (file, group), lambda: _read_group(file, group, self._columns.names)
    )
    first = self._ends[place] - table.num_rows
    content = table.column(self._columns.image)[row - first].as_py()
    name = f"{self._root}/{self._row_name(row)}"
    if isinstance(content, dict):
      content = content["bytes"]
    if content is None:
      raise ValueError(
        f"{name}: the row has no bytes of an image in column "
        f"{self._columns.image!r}, at most the path of a file; `save_to_disk` "
        "of datasets stores the bytes, its `to_parquet` may not"
      )
    return Record(int(self._labels[row]), name, content)

  def name(self, index: int) -> str:
    """File and number of the row from 1: "data/train-0.parquet:7"."""
    return self._row_name(int(self._rows[index]))

  def _row_name(self, row: int) -> str:
    number = bisect.bisect_right(self._starts, row) - 1
    return f"{self._names[number]}:{row - self._starts[number] + 1}"

  def _check_heads(self, heads: list[_Head]) -> None:
    """Refuses files of other columns; warns where a row is slow to read."""
    first = heads[0].schema
    for head in heads[1:]:
      for column in self._columns.names:
        index = head.schema.get_field_index(column)
        wanted = first.field(column).type
        if index < 0 or head.schema.field(index).type != wanted:
          raise ValueError(
            f"{head.file}: column {column!r} must be as in {heads[0].file}, "
            f"{wanted}; columns are {head.schema.names}"
          )
    largest = max(head.group_bytes for head in heads)
    if largest > _LARGE_GROUP:
      _LOG.warning(
        "%s: row groups of up to %d MB, which are read whole for one image; "
        "pack-images makes shards of them",
        self._root,
        largest >> 20,
      )

  def _read_labels(self) -> tuple[np.ndarray, tuple[str, ...]]:
    """The label of every row, and the names of the classes."""
    pyarrow = import_extra("pyarrow", str(self._root), "images")
    column = self._columns.label
    if not column:
      return np.zeros(sum(self._file_rows), np.int32), (FLAT_CLASS,)
    parts = [
      _read_group(str(self._root / name), None, [column])
      for name in self._names
    ]
    labels = pyarrow.concat_tables(parts).column(column)
    where = f"{self._root}: column {column!r}"
    if labels.null_count:
      raise ValueError(f"{where} has {labels.null_count} rows without a label")
    if labels.type in (pyarrow.string(), pyarrow.large_string()):
      values, positions = np.unique(labels.to_pylist(), return_inverse=True)
      return positions.astype(np.int32), tuple(map(str, values))
    if not pyarrow.types.is_integer(labels.type):
      raise ValueError(f"{where} is of {labels.type}, must be numbers or text")
    numbers = labels.to_numpy()
    names = self._columns.class_names
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < 0:
      raise ValueError(
        f"{where} has the label {lowest}, must be at least 0; a test split "
        "without labels cannot be used"
      )
    if highest >= (len(names) or _MOST_CLASSES):
      raise ValueError(
        f"{where} has the label {highest}, must be below "
        f"{len(names) or _MOST_CLASSES}, the number of classes"
      )
    names = names or tuple(map(str, range(highest + 1)))
    return numbers.astype(np.int32), names


def is_tables(root: str | os.PathLike) -> bool:
  """Whether a local folder is read as tables: `find_tables` finds some.

  A table beside class folders that hold images is a note on them.
  """
  is_classes = os.path.isdir(root) and has_class_images(root)
  return not is_classes and any(_walk(root))


def find_tables(root: str | os.PathLike) -> dict[str, list[str]]:
  """Finds the tables in a folder and all below it, by split.

  The name of a file, else of the folder nearest to it, tells the split, as in
  data/train-00000-of-00002.parquet or validation/0.parquet. Where none does,
  all are "train". Of a folder that `save_to_disk` wrote, the files are those
  that its state.json lists.

  Args:
    root: local folder.

  Returns:
    Paths below `root` of the files of "train", "val" or both, in order; empty
    where there is no table.

  Raises:
    ValueError: a state.json is damaged, or files of one folder tell splits and
      others do not.
  """
  found: dict[str, list[str]] = collections.defaultdict(list)
  for name in _walk(root):
    found[_split(name)].append(name)
  # A test split is held out where there is no other.
  if "val" not in found and "test" in found:
    found["val"] = found["test"]
  if found[""] and len(found) > 1:
    raise ValueError(
      f"{root}: {found[''][0]!r} names no split, others do; name them all like "
      "train-0.parquet or train/0.parquet"
    )
  splits = {"train": found["train"] or found[""], "val": found["val"]}
  return {split: files for split, files in splits.items() if files}


def _walk(root: str | os.PathLike) -> Iterator[str]:
  """Paths below `root` of the tables in it that are not hidden."""
  root = os.path.abspath(root)
  for where, below, names in os.walk(root):
    below[:] = sorted(name for name in below if not name.startswith("."))
    tables = [
      os.path.join(where, name)
      for name in sorted(names)
      if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
    ]
    if tables and "state.json" in names:
      tables = list_files([where])
    for table in tables:
      yield pathlib.Path(table).relative_to(root).as_posix()


def _split(name: str) -> str:
  for part in reversed(name.lower().split("/")):
    if words := _WORD.findall(part):
      return SPLIT_WORDS[words[0]]
  return ""


def _find_columns(schema: Any, file: str, label: str) -> _Columns:
  """Finds the columns of images and labels.

  Args:
    schema: of pyarrow, with the notes that `datasets` leaves in it.
    file: for messages.
    label: name of the column of labels; "" takes the only one of classes, else
      one that is called "label" or the like.

  Raises:
    ValueError: there is none, or not only one.
  """
  types = import_extra("pyarrow.types", file, "images")
  features = _features(schema, file)
  images = [
    field.name
    for field in schema
    if (
      (types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0)
      or types.is_binary(field.type)
      or types.is_large_binary(field.type)
    )
  ]
  images = [n for n in images if features[n].kind == "Image"] or images
  if len(images) != 1:
    raise ValueError(
      f"{file}: {len(images)} columns of images {images}, must be one; columns "
      f"are {schema.names}"
    )
  if label and label not in schema.names:
    raise ValueError(
      f"data.label_column={label!r} must be one of {schema.names}, the columns "
      f"of {file}"
    )
  if not label:
    classes = [n for n in schema.names if features[n].kind == "ClassLabel"]
    candidates = classes or [n for n in schema.names if n in _LABELS]
    if len(candidates) > 1:
      raise ValueError(
        f"{file}: labels may be in the columns {candidates}; choose with "
        "data.label_column or --label-column"
      )
    label = candidates[0] if candidates else ""
  names = features[label].names if label else None
  return _Columns(images[0], label, tuple(names or ()))


def _features(schema: Any, file: str) -> dict[str, _Feature]:
  """What the library `datasets` noted of the columns."""
  found: dict[str, _Feature] = collections.defaultdict(_Feature)
  text = (schema.metadata or {}).get(b"huggingface")
  if text is None:
    return found
  what = f"{file}: the notes of `datasets` in its schema"
  notes = parse_json(text, _Notes, what, _MOST_SCHEMA)
  for name, value in notes["info"]["features"].items():
    try:
      found[name] = msgspec.convert(value, _Feature)
    except msgspec.ValidationError:  # a list or a nested feature, no image
      continue
  return found


def _read_head(file: str) -> _Head:
  """Reads the head of a file.

  Raises:
    ValueError: it is damaged, or pyarrow is missing.
  """
  import_extra("pyarrow", file, "images")
  if _is_arrow(file):
    mapped = _map_arrow(file)
    return _Head(file, mapped.schema, (mapped.num_rows,), 0)
  with open_parquet(file) as table:
    metadata = table.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    largest = max((group.total_byte_size for group in groups), default=0)
    return _Head(file, table.schema_arrow, rows, largest)


def _read_group(file: str, group: int | None, columns: list[str]) -> Any:
  """Reads some columns of a row group, None of all, as a table of pyarrow.

  Raises:
    ValueError: the file is damaged.
  """
  if _is_arrow(file):
    return _map_arrow(file).select(columns)
  pyarrow = import_extra("pyarrow", file, "images")
  with open_parquet(file) as table:
    groups = range(table.num_row_groups) if group is None else [group]
    try:
      return table.read_row_groups(groups, columns=columns, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
      which = f"row group {group}"
      which = f"column {columns[0]!r}" if group is None else which
      raise ValueError(f"{file}: {which} is damaged: {error}") from error


def _is_arrow(file: str) -> bool:
  return file.lower().endswith(".arrow")


def _map_arrow(file: str) -> Any:
  """An Arrow file as a table whose data are read when they are used."""
  pyarrow = import_extra("pyarrow", file, "images")
  try:
    return open_arrow(file)[1].read_all()
  except FileNotFoundError:
    raise
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{file}: damaged or no Arrow file: {error}") from error


def _kept_bytes(key: tuple[str, int], group: Any) -> int:
  """Memory of a row group of (file, number): mapped files need none."""
  return 0 if _is_arrow(key[0]) else group.nbytes
