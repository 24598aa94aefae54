"""Arrow files: streams, as the library `datasets` writes them, or Feather.

Batches may be compressed, and pyarrow unpacks a whole one whatever size it
states; rows of nulls need no bytes at all. So the sizes are read first, from
messages of which pyarrow shows the raw metadata: FlatBuffers as Arrow's
Message.fbs and File.fbs describe them.
"""

import contextlib
import struct
from collections.abc import Iterable, Iterator
from typing import IO, Any

from moh_jax.data.input_files import (
  check_rows,
  check_unpacked,
  import_extra,
  is_address,
  open_file,
)

_FOOTED = b"ARROW1"  # first bytes of files that have a footer
# Places of fields in their tables.
_HEADER, _DATA = 2, 1  # of a message, of a dictionary
_ROWS, _BUFFERS, _COMPRESSION = 0, 2, 3  # of a batch
_DICTIONARIES, _BATCHES = 2, 3  # of a footer
_BUFFER_BYTES, _BLOCK_BYTES = 16, 24
_END = struct.Struct("<I6s")  # the footer's length and `_FOOTED`


def open_arrow(file: str) -> tuple[IO[bytes], Any]:
  """Opens an Arrow file; a local one is mapped into memory.

  Returns:
    The file, and pyarrow's reader of it, which only of a file with a footer has
    `get_batch`.

  Raises:
    pyarrow.ArrowException: the file is damaged.
    OSError: it cannot be read, or is damaged.
    ValueError: the library is missing, or a local file states too many
      rows or unpacks to too much.
  """
  pyarrow = import_extra("pyarrow", file)
  ipc = import_extra("pyarrow.ipc", file)
  stream = open_file(file) if is_address(file) else pyarrow.memory_map(file)
  has_footer = stream.read(len(_FOOTED)) == _FOOTED
  if not is_address(file):
    with contextlib.suppress(OSError, pyarrow.ArrowException):
      # Damage shows when the rows behind it are read, which may be left out.
      _check_sizes(file, stream.size(), _messages(stream, ipc, has_footer))
  stream.seek(0)
  return stream, (ipc.open_file if has_footer else ipc.open_stream)(stream)


def _messages(stream: IO[bytes], ipc: Any, has_footer: bool) -> Iterator[Any]:
  """The messages that a reader finds: one after the other, or by the footer."""
  if not has_footer:
    stream.seek(0)
    yield from ipc.MessageReader.open_stream(stream)
    return
  with _damage():
    stream.seek(end := max(stream.size() - _END.size, 0))
    (length, _) = _END.unpack(stream.read(_END.size))
    stream.seek(max(end - length, 0))
    footer = stream.read(length)
    (root,) = struct.unpack_from("<I", footer)
    starts = [
      struct.unpack_from("<q", footer, place)[0]
      for field in (_DICTIONARIES, _BATCHES)
      for place in _places(footer, root, field, _BLOCK_BYTES)
    ]
  for start in starts:
    stream.seek(start)
    yield ipc.read_message(stream)


def _check_sizes(file: str, size: int, messages: Iterable[Any]) -> None:
  """Refuses what states more rows or bytes than the file may mean.

  Raises:
    OSError: a message is damaged.
    ValueError: it does.
  """
  rows = unpacked = 0
  for message in messages:
    with _damage():
      batch_rows, batch_bytes = _sizes(message)
    rows, unpacked = rows + batch_rows, unpacked + batch_bytes
  check_rows(file, rows)
  check_unpacked(file, unpacked, size)


def _sizes(message: Any) -> tuple[int, int]:
  """The rows of a message, and what its compressed buffers unpack to."""
  if message.type not in ("record batch", "dictionary"):
    return 0, 0
  data, unpacked = message.metadata.to_pybytes(), 0
  batch = _table(data, *struct.unpack_from("<I", data), _HEADER)
  is_batch = message.type == "record batch"
  batch = batch if is_batch else _table(data, batch, _DATA)
  place = _place(data, batch, _ROWS) if is_batch else 0
  (rows,) = struct.unpack_from("<q", data, place) if place else (0,)
  if _place(data, batch, _COMPRESSION):
    for place in _places(data, batch, _BUFFERS, _BUFFER_BYTES):
      start, length = struct.unpack_from("<qq", data, place)
      if length >= 8:  # begins with its size, -1 if it is not compressed
        (size,) = struct.unpack_from("<q", message.body, start)
        unpacked += max(size, 0)
  return rows, unpacked


@contextlib.contextmanager
def _damage() -> Iterator[None]:
  try:
    yield
  except struct.error as error:
    raise OSError(f"damaged metadata: {error}") from error


def _places(data: bytes, table: int, field: int, size: int) -> Iterator[int]:
  """Where the structs of a vector, of `size` bytes each, lie."""
  if _place(data, table, field):
    vector = _table(data, table, field)
    (count,) = struct.unpack_from("<I", data, vector)
    for number in range(min(count, len(data) // size)):
      yield vector + 4 + size * number


def _table(data: bytes, table: int, field: int) -> int:
  """Where a table or vector begins that a field of a table names."""
  place = _place(data, table, field)
  return place + struct.unpack_from("<I", data, place)[0]


def _place(data: bytes, table: int, field: int) -> int:
  """Where a table holds a field; 0 if it does not."""
  (back,) = struct.unpack_from("<i", data, table)
  (length,) = struct.unpack_from("<H", data, table - back)
  place = 4 + 2 * field
  if place >= length:
    return 0
  (offset,) = struct.unpack_from("<H", data, table - back + place)
  return offset and table + offset
