"""Images in Parquet or Arrow files on disk, as Hugging Face publishes them.

A row holds an image's bytes, as {"bytes", "path"} or as a column of bytes, and
its label, as the library `datasets` writes them; `datasets` is not needed.

Any row can be read. Of a Parquet file its whole row group is read for it (often
100 rows; 10 MB took 2.7 ms of one core), and the last groups are kept, so rows
in order are quick and random ones are not; `prepare pack-images` makes shards
of them. Arrow files are mapped into memory.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import os
import pathlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from moh_jax.config.registry import MissingSplitError
from moh_jax.data import arrow_files, input_files
from moh_jax.data.identity import Identity, of_shards
from moh_jax.data.image_folders import (
  ALL,
  FLAT_CLASS,
  EncodedSource,
  Record,
  Selection,
  has_class_images,
  hold_out,
)
from moh_jax.data.sources import SharedReads, match_classes
from moh_jax.data.text_files import damage
from moh_jax.runtime.json_files import parse_json

_MOST_CLASSES = 1 << 20
_KEPT_BYTES = 1 << 28  # of row groups that a process keeps
_SUFFIXES = (".parquet", ".arrow")
_LABELS = ("label", "labels", "class", "target")  # usual names of the column
_ROWS_AT_ONCE = 4
_MOST_SCHEMA = 1 << 26  # bytes that a schema's notes may have


class _Feature(msgspec.Struct):
  kind: str = msgspec.field(name="_type", default="")
  names: list[str] | None = None


class _Notes(msgspec.Struct):
  class Info(msgspec.Struct):
    features: dict[str, Any] = {}

  info: Info = msgspec.field(default_factory=Info)


class _Columns(NamedTuple):
  """Which columns hold images and labels.

  Attributes:
    image: name of the column of images.
    label: name of the column of labels; "" makes all images one class.
    class_names: of the labels, in order; () where the schema names none.
  """

  image: str
  label: str
  class_names: tuple[str, ...]


class ParquetSource(EncodedSource):
  """Source of the images in the tables of a split, see `find_tables`."""

  def __init__(
    self, path: str, split: str, channels: int, selection: Selection = ALL
  ):
    """Reads the heads of a split's files.

    Args:
      path: local folder of the tables.
      split: "train" or "val".
      channels: 1 converts to grey, 3 to RGB.
      selection: of the images; of a share that is held out a hash of file and
        row decides.

    Raises:
      MissingSplitError: there is no table of that split.
      FileNotFoundError: its tables have no rows.
      ValueError: a file is damaged, or has no images, other columns or labels
        without a class; pyarrow is missing.
    """
    found = find_tables(path)
    divided = "val" not in found and selection.val_share > 0
    self._names = found.get("train" if divided else split, [])
    if not self._names:
      raise MissingSplitError(
        f"data.path={path!r} holds no Parquet or Arrow file of {split!r}; "
        f"expected such as {path}/{split}-0.parquet or {path}/{split}/0.parquet"
      )
    self._root, self.channels = pathlib.Path(path), channels
    # (file, number of the row group in it), and the rows up to its end.
    self._groups: list[tuple[str, int]] = []
    group_rows: list[int] = []
    self._file_rows: list[int] = []
    for name in self._names:
      schema, groups = _read_head(file := str(self._root / name))
      if not self._file_rows:
        first = schema
        self._columns = _find_columns(schema, file, selection.label_column)
        label = self._columns.label
      for column in filter(None, self._columns[:2]):
        wanted, index = first.field(column).type, schema.get_field_index(column)
        if index < 0 or schema.field(index).type != wanted:
          raise ValueError(
            f"{file}: column {column!r} must be as in {self._names[0]}, "
            f"{wanted}; columns are {schema.names}"
          )
      own, names = _class_names(schema, file, label), self._columns.class_names
      if own and names and own != names:
        raise ValueError(
          f"{file}: column {label!r} must name the classes that "
          f"{self._names[0]} names, in the same order"
        )
      self._groups += [(file, group) for group in range(len(groups))]
      group_rows += groups
      self._file_rows.append(sum(groups))
    self._ends = list(itertools.accumulate(group_rows))
    self._starts = [0, *itertools.accumulate(self._file_rows)]
    read = functools.partial(_read_group, column=self._columns.image)
    self._read_groups = SharedReads(_KEPT_BYTES, read, _kept_bytes)
    if not any(self._file_rows):
      raise FileNotFoundError(f"data.path={path!r}: its tables have no rows")
    self._labels, self.class_names = self._read_labels()
    self._rows, self._held_out = np.arange(len(self._labels)), ""
    if divided:
      names = [self._row_name(row) for row in self._rows]
      known = self._labels.tolist(), split, selection.val_share
      chosen = hold_out(names, *known, self.class_names, self._root)
      self._rows, self._held_out = np.array(chosen), f"{selection.val_share:g}"
    if selection.class_names:
      self.class_names, labels = match_classes(
        *(self.class_names, selection.class_names, str(self._root)),
        are_labels=self._are_labels,
      )
      self._labels = np.array(labels, np.int32)[self._labels]

  def __len__(self) -> int:
    return len(self._rows)

  def identity(self) -> Identity:
    """Identifies the files, in order, and the rows that are taken of them."""
    sizes = [(self._root / name).stat().st_size for name in self._names]
    entries = [
      {"file": name, "examples": rows, "bytes": size}
      for name, rows, size in zip(self._names, self._file_rows, sizes)
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
    table = self._read_groups.get(self._groups[place])
    column = self._columns.image
    content = table.column(column)[row - self._ends[place] + table.num_rows]
    content, name = content.as_py(), f"{self._root}/{self._row_name(row)}"
    if isinstance(content, dict):
      content = content["bytes"]
    if content is None:
      raise ValueError(
        f"{name}: the row has no bytes of an image in column {column!r}, at "
        "most the path of a file; `save_to_disk` of datasets stores the bytes"
      )
    return Record(int(self._labels[row]), name, content)

  def name(self, index: int) -> str:
    """File and number of the row from 1: "data/train-0.parquet:7"."""
    return self._row_name(int(self._rows[index]))

  def _row_name(self, row: int) -> str:
    number = bisect.bisect_right(self._starts, row) - 1
    return f"{self._names[number]}:{row - self._starts[number] + 1}"

  def _read_labels(self) -> tuple[np.ndarray, tuple[str, ...]]:
    """The label of every row, and the names of the classes."""
    pyarrow = input_files.import_extra("pyarrow", str(self._root), "images")
    _, column, names = self._columns
    self._are_labels = False
    if not column:
      return np.zeros(sum(self._file_rows), np.int32), (FLAT_CLASS,)
    files = (str(self._root / name) for name in self._names)
    parts = [_read_group((file, None), column) for file in files]
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
    most = len(names) or _MOST_CLASSES
    for label in (int(numbers.min()), int(numbers.max())):
      if not 0 <= label < most:
        raise ValueError(
          f"{where} has the label {label}, must be at least 0 (a test split "
          f"without labels cannot be used) and below {most}, the number of "
          "classes"
        )
    self._are_labels = not names
    return numbers.astype(np.int32), names or tuple(map(str, range(label + 1)))


def is_tables(root: str | os.PathLike) -> bool:
  """Whether a local folder is read as tables: `find_tables` finds some.

  A table beside class folders that hold images is a note on them.
  """
  is_classes = os.path.isdir(root) and has_class_images(root)
  return not is_classes and any(input_files.walk(root, _SUFFIXES))


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
  found = input_files.files_by_split(root, _SUFFIXES)
  if found[""] and len(found) > 1:
    raise ValueError(
      f"{root}: {found[''][0]!r} names no split, others do; name them all like "
      "train-0.parquet or train/0.parquet"
    )
  splits = {"train": found["train"] or found[""], "val": found["val"]}
  return {split: files for split, files in splits.items() if files}


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
  types = input_files.import_extra("pyarrow.types", file, "images")
  features = _features(schema, file)

  def of_kind(kind: str) -> list[str]:
    return [name for name in schema.names if features[name].kind == kind]

  def holds_bytes(kind: Any) -> bool:
    if types.is_struct(kind):
      return kind.get_field_index("bytes") >= 0
    return types.is_binary(kind) or types.is_large_binary(kind)

  images = [field.name for field in schema if holds_bytes(field.type)]
  images = [name for name in of_kind("Image") if name in images] or images
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
  usual = [name for name in schema.names if name in _LABELS]
  labels = [label] if label else of_kind("ClassLabel") or usual
  if len(labels) > 1:
    raise ValueError(
      f"{file}: labels may be in the columns {labels}; choose with "
      "data.label_column or --label-column"
    )
  label = labels[0] if labels else ""
  return _Columns(images[0], label, _class_names(schema, file, label))


def _class_names(schema: Any, file: str, label: str) -> tuple[str, ...]:
  """The classes that a column's notes name, in order; () without notes."""
  return tuple(_features(schema, file)[label].names or ())


def _features(schema: Any, file: str) -> dict[str, _Feature]:
  """What the library `datasets` noted of the columns."""
  found: dict[str, _Feature] = collections.defaultdict(_Feature)
  text = (schema.metadata or {}).get(b"huggingface", b"{}")
  what = f"{file}: the notes of `datasets` in its schema"
  notes = parse_json(text, _Notes, what, _MOST_SCHEMA)
  features = notes.get("info", {}).get("features", {})
  for name, value in features.items():
    with contextlib.suppress(msgspec.ValidationError):  # a list, no image
      found[name] = msgspec.convert(value, _Feature)
  return found


def _read_head(file: str) -> tuple[Any, list[int]]:
  """The schema of a file, and the rows of each row group; Arrow has one.

  Raises:
    ValueError: it is damaged, or pyarrow is missing.
  """
  if _is_arrow(file):
    mapped = _map_arrow(file)
    return mapped.schema, [mapped.num_rows]
  with input_files.open_parquet(file) as table:
    groups = map(table.metadata.row_group, range(table.num_row_groups))
    return table.schema_arrow, [group.num_rows for group in groups]


def _read_group(place: tuple[str, int | None], column: str) -> Any:
  """Reads a column of a row group, None of all, as a table of pyarrow.

  Raises:
    ValueError: the file is damaged.
  """
  file, group = place
  if _is_arrow(file):
    return _map_arrow(file).select([column])
  pyarrow = input_files.import_extra("pyarrow", file, "images")
  where = f"{file}, row group {group}, column {column!r}"
  with (
    input_files.open_parquet(file) as table,
    damage(where, pyarrow.ArrowException),
  ):
    groups = range(table.num_row_groups) if group is None else [group]
    options = {"columns": [column], "use_threads": False}
    if group is None:  # of labels, which are short
      return table.read_row_groups(groups, **options)
    batches, total, size = [], 0, input_files.file_size(file)
    # A value that many rows share is stored once.
    options["row_groups"] = groups
    for batch in table.iter_batches(_ROWS_AT_ONCE, **options):
      total += batch.nbytes
      input_files.check_unpacked(file, total, size)
      batches.append(batch)
    return pyarrow.Table.from_batches(batches, batches[0].schema)


def _kept_bytes(place: tuple[str, int | None], group: Any) -> int:
  """Memory of a row group of (file, number): mapped files need none."""
  return 0 if _is_arrow(place[0]) else group.nbytes


def _is_arrow(file: str) -> bool:
  return file.lower().endswith(".arrow")


def _map_arrow(file: str) -> Any:
  """An Arrow file as a table whose data are read when they are used."""
  pyarrow = input_files.import_extra("pyarrow", file, "images")
  with damage(file, pyarrow.ArrowException):
    return arrow_files.open_arrow(file)[1].read_all()
