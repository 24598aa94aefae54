"""Images in Parquet or Arrow files on disk, as Hugging Face publishes them.

Any row can be read. Of a Parquet file its whole row group is read for it (often
100 rows), and the last groups are kept, so rows in order are quick and random
ones are not; `pack-images` makes shards of them. Arrow files are mapped into
memory.
"""

import bisect
import itertools
import logging
import pathlib

import numpy as np
import xxhash

from moh_jax.data.extras import import_extra
from moh_jax.data.identity import Identity, of_shards
from moh_jax.data.images import tables
from moh_jax.data.images.classes import ClassList, match_classes
from moh_jax.data.images.encoded import EncodedSource, Record
from moh_jax.data.images.folders import FLAT_CLASS, check_share, is_held_out
from moh_jax.data.images.shared_reads import SharedReads

_LOG = logging.getLogger(__name__)
_LARGE_GROUP = 1 << 26  # bytes; 10 MB took 2.7 ms of one core for one image
_MOST_CLASSES = 1 << 20
_KEPT_BYTES = 1 << 28  # of row groups that a process keeps


class ParquetSource(EncodedSource):
  """Source of the images in the tables of a split, see `tables.find_tables`."""

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
      FileNotFoundError: there is no table of that split.
      ValueError: a file is damaged, or has no images, other columns or labels
        without a class; pyarrow is missing.
    """
    found = tables.find_tables(path)
    divided = "val" not in found and val_share > 0
    self._names = found.get("train" if divided else split, [])
    if not self._names:
      raise FileNotFoundError(
        f"data.path={path!r} holds no Parquet or Arrow file of {split!r}; "
        f"expected such as {path}/{split}-0.parquet or {path}/{split}/0.parquet"
      )
    self._root, self.channels = pathlib.Path(path), channels
    heads = [tables.open_table(str(self._root / name)) for name in self._names]
    self._columns = tables.find_columns(
      heads[0].schema, heads[0].file, label_column
    )
    self._check_heads(heads)
    self._file_rows = [sum(head.rows) for head in heads]
    # (number of the file, of the group in it), and the rows up to its end.
    self._groups = [
      (number, group)
      for number, head in enumerate(heads)
      for group in range(len(head.rows))
    ]
    self._ends = list(
      itertools.accumulate(rows for head in heads for rows in head.rows)
    )
    self._starts = [0, *itertools.accumulate(self._file_rows)]
    self._read_groups = SharedReads(_KEPT_BYTES, tables.kept_bytes)
    if not any(self._file_rows):
      raise FileNotFoundError(f"data.path={path!r}: its tables have no rows")
    labels, own = self._read_labels()
    self._rows, self._held_out = np.arange(len(labels)), ""
    if divided:
      held_out = np.array(
        [is_held_out(self._row_name(row), val_share) for row in self._rows]
      )
      self._rows = np.flatnonzero(held_out == (split == "val"))
      self._held_out = f"{val_share:g}"
      # A schema may name classes that have no rows.
      every, present = set(labels.tolist()), set(labels[self._rows].tolist())
      check_share(self._root, own, every, present, split, val_share)
    self._labels = labels
    self.class_names = own
    if class_names:
      where = str(self._root)
      self.class_names, known = match_classes(own, class_names, where)
      self._labels = np.array(known, np.int32)[labels]

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
      (file, group),
      lambda: tables.read_group(file, group, self._columns.names),
    )
    first = self._ends[place] - table.num_rows
    value = table.column(self._columns.image)[row - first]
    content, name = value.as_py(), f"{self._root}/{self._row_name(row)}"
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

  def _check_heads(self, heads: list[tables.Table]) -> None:
    """Refuses files of other columns; warns where a row is slow to read."""
    first = heads[0].schema
    for head in heads[1:]:
      for column in self._columns.names:
        index = head.schema.get_field_index(column)
        if (
          index < 0 or head.schema.field(index).type != first.field(column).type
        ):
          raise ValueError(
            f"{head.file}: column {column!r} must be as in {heads[0].file}, "
            f"{first.field(column).type}; columns are {head.schema.names}"
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
      tables.read_group(str(self._root / name), None, [column])
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
