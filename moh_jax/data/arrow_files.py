"""Arrow files: streams, as the library `datasets` writes them, or Feather.

Batches may be compressed, and pyarrow unpacks a whole one whatever size it
states. So the sizes are read from the messages first, of which pyarrow shows
the raw metadata: FlatBuffers as Arrow's Message.fbs describes them.
"""

import contextlib
import struct
from typing import IO, Any

from moh_jax.data.input_files import import_extra, is_address, open_file

_FOOTED = b"ARROW1"  # first bytes of files that have a footer
_START = 8  # of their first message
_RATIO = 64  # bytes that one of a file may become; texts have about 10
_MOST_UNPACKED = 1 << 28  # bytes that any small file may unpack to
# Places of fields in their tables.
_HEADER, _DATA, _BUFFERS, _COMPRESSION = 2, 1, 2, 3


def open_arrow(file: str) -> tuple[IO[bytes], Any]:
  """Opens an Arrow file; a local one is mapped into memory.

  Returns:
    The file, and pyarrow's reader of it, which only of a file with a footer has
    `get_batch`.

  Raises:
    pyarrow.ArrowException: the file is damaged.
    OSError: it cannot be read, or is damaged.
    ValueError: the library is missing, or a local file unpacks to too much.
  """
  pyarrow = import_extra("pyarrow", file)
  ipc = import_extra("pyarrow.ipc", file)
  stream = open_file(file) if is_address(file) else pyarrow.memory_map(file)
  has_footer = stream.read(len(_FOOTED)) == _FOOTED
  if not is_address(file):
    stream.seek(_START if has_footer else 0)
    most = max(_MOST_UNPACKED, _RATIO * stream.size())
    unpacked = 0
    # Damage shows when the rows behind it are read, which may be left out.
    with contextlib.suppress(OSError, pyarrow.ArrowException):
      for message in ipc.MessageReader.open_stream(stream):
        unpacked += _unpacked_bytes(message)
    if unpacked > most:
      raise ValueError(
        f"{file}: unpacks to {unpacked:,} bytes, must be at most {most:,}"
      )
  stream.seek(0)
  return stream, (ipc.open_file if has_footer else ipc.open_stream)(stream)


def _unpacked_bytes(message: Any) -> int:
  """What the compressed buffers of a message say that they unpack to."""
  if message.type not in ("record batch", "dictionary"):
    return 0
  data, total = message.metadata.to_pybytes(), 0
  try:
    batch = _table(data, *struct.unpack_from("<I", data), _HEADER)
    if message.type == "dictionary":
      batch = _table(data, batch, _DATA)
    if not _place(data, batch, _COMPRESSION):
      return 0
    vector = _table(data, batch, _BUFFERS)
    (count,) = struct.unpack_from("<I", data, vector)
    for number in range(count):
      start, length = struct.unpack_from("<qq", data, vector + 4 + 16 * number)
      if length >= 8:  # begins with its size, -1 if it is not compressed
        (size,) = struct.unpack_from("<q", message.body, start)
        total += max(size, 0)
  except struct.error as error:
    raise OSError(f"damaged batch: {error}") from error
  return total


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
