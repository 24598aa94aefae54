"""Parquet and Arrow files of images, laid out as by the library `datasets`.

A row holds an image's bytes, as {"bytes", "path"} or as a column of bytes, and
its label. pyarrow reads the files; `datasets` is not needed.
"""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from moh_jax.data.extras import import_extra
from moh_jax.data.images.folders import SPLIT_WORDS, has_class_images
from moh_jax.data.text.pieces import open_parquet
from moh_jax.data.text.places import list_files
from moh_jax.json_files import parse_json

_SUFFIXES = (".parquet", ".arrow")
_WORD = re.compile(r"(?<![a-z])(" + "|".join(SPLIT_WORDS) + r")(?![a-z])")
_LABELS = ("label", "labels", "class", "target")  # usual names of the column
_MOST_SCHEMA = 1 << 26  # bytes that a schema's notes may have
_FEATHER = b"ARROW1"  # first bytes of Arrow files that have a footer


class _Feature(msgspec.Struct):
  kind: str = msgspec.field(name="_type", default="")
  names: list[str] | None = None


class _Info(msgspec.Struct):
  features: dict[str, Any] = {}


class _Notes(msgspec.Struct):
  info: _Info = msgspec.field(default_factory=_Info)


@dataclasses.dataclass(frozen=True)
class Columns:
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


def find_columns(schema: Any, file: str, label: str) -> Columns:
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
  stated = [name for name in images if features[name].kind == "Image"]
  images = stated or images
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
    usual = [n for n in schema.names if n in _LABELS]
    candidates = classes or usual
    if len(candidates) > 1:
      raise ValueError(
        f"{file}: labels may be in the columns {candidates}; choose with "
        "data.label_column or --label-column"
      )
    label = candidates[0] if candidates else ""
  names = features[label].names if label else None
  return Columns(images[0], label, tuple(names or ()))


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


@dataclasses.dataclass(frozen=True)
class Table:
  """A file, and what its head says.

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


def open_table(file: str) -> Table:
  """Reads the head of a file.

  Raises:
    ValueError: it is damaged, or pyarrow is missing.
  """
  import_extra("pyarrow", file, "images")
  if _is_arrow(file):
    mapped = _map_arrow(file)
    return Table(file, mapped.schema, (mapped.num_rows,), 0)
  with open_parquet(file) as table:
    metadata = table.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    rows = tuple(group.num_rows for group in groups)
    largest = max((group.total_byte_size for group in groups), default=0)
    return Table(file, table.schema_arrow, rows, largest)


def read_group(file: str, group: int | None, columns: list[str]) -> Any:
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
      which = (
        f"column {columns[0]!r}" if group is None else f"row group {group}"
      )
      raise ValueError(f"{file}: {which} is damaged: {error}") from error


def _is_arrow(file: str) -> bool:
  return file.lower().endswith(".arrow")


def _map_arrow(file: str) -> Any:
  """An Arrow file as a table whose data are read when they are used."""
  pyarrow = import_extra("pyarrow", file, "images")
  ipc = import_extra("pyarrow.ipc", file, "images")
  try:
    mapped = pyarrow.memory_map(file)
    has_footer = mapped.read(len(_FEATHER)) == _FEATHER
    mapped.seek(0)
    return (ipc.open_file if has_footer else ipc.open_stream)(mapped).read_all()
  except FileNotFoundError:
    raise
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(f"{file}: damaged or no Arrow file: {error}") from error


def kept_bytes(key: tuple[str, int], group: Any) -> int:
  """Memory of a row group of (file, number): mapped files need none."""
  return 0 if _is_arrow(key[0]) else group.nbytes
