"""Opens files that may be packed with gzip or Zstandard."""

import gzip
import io
from typing import IO, Any

from moh_jax.data.extras import import_extra
from moh_jax.data.text.places import open_file

_PACKED_BYTES = 1 << 16  # read at one time
_BUFFER_BYTES = 1 << 20  # of unpacked text


def open_unpacked(file: str, packing: str) -> IO[bytes]:
  """Opens a file for reading its content.

  All that could be unpacked before a file's damage, or before the place where
  it was cut off, is read before the error.

  Args:
    file: path or address.
    packing: ".gz", ".zst" or "".

  Raises:
    OSError: the file cannot be opened.
    ValueError: a library is missing.
  """
  if packing == ".zst":
    library = import_extra("zstandard", file)
    frames = _Frames(open_file(file), library)
    return io.BufferedReader(frames, _BUFFER_BYTES)
  stream = open_file(file)
  return _Gzip(fileobj=stream) if packing else stream


class _Gzip(gzip.GzipFile):
  """A gzip file that closes the file below it."""

  def close(self) -> None:
    packed = self.fileobj
    super().close()
    if packed is not None:
      packed.close()


class _Frames(io.RawIOBase):
  """The content of Zstandard frames, one after another."""

  def __init__(self, packed: IO[bytes], library: Any):
    self._packed, self._library = packed, library
    self._unpacker: Any = None  # of the frame that is being read
    self._input, self._output = b"", b""

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    while not self._output and self._fill():
      pass
    part, self._output = (
      self._output[: len(buffer)],
      self._output[len(buffer) :],
    )
    buffer[: len(part)] = part
    return len(part)

  def close(self) -> None:
    self._packed.close()
    super().close()

  def _fill(self) -> bool:
    """Unpacks some more; returns whether the file went on."""
    self._input = self._input or self._packed.read(_PACKED_BYTES)
    if not self._input:
      if self._unpacker:
        raise EOFError("the last Zstandard frame has no end")
      return False
    if self._unpacker is None:
      self._unpacker = self._library.ZstdDecompressor().decompressobj()
    try:
      self._output = self._unpacker.decompress(self._input)
    except self._library.ZstdError as error:
      raise EOFError(str(error)) from error
    self._input = b""
    if self._unpacker.eof:
      self._input, self._unpacker = self._unpacker.unused_data, None
    return True
