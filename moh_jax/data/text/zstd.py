"""Reads Zstandard files as streams that raise if the end is missing."""

import io
import pathlib
from typing import IO

from moh_jax.data.extras import import_extra

_CHUNK = 1 << 18  # compressed bytes to read at one time


class ZstdReader(io.RawIOBase):
  """Stream of the unpacked bytes of a file with one or more frames.

  The library's own stream ends silently where a frame is truncated.
  """

  def __init__(self, file: str):
    """Opens a file.

    Raises:
      ValueError: the library is missing.
    """
    self._library = import_extra("zstandard", file)
    self._packed = pathlib.Path(file).open("rb")
    self._frame = None  # decompressor of the frame that is being read
    self._input = b""
    self._output = memoryview(b"")

  @classmethod
  def open(cls, file: str) -> IO[bytes]:
    """Opens a buffered stream, which raises the errors of `readinto`."""
    return io.BufferedReader(cls(file), 1 << 20)

  def readable(self) -> bool:
    """Returns True, which `io.BufferedReader` asks for."""
    return True

  def readinto(self, target) -> int:
    """Reads into a buffer.

    Returns:
      Number of bytes read, 0 at the end of the file.

    Raises:
      EOFError: a frame is damaged or truncated.
    """
    while not self._output:
      if not self._input:
        self._input = self._packed.read(_CHUNK)
      if not self._input:
        if self._frame is not None:
          raise EOFError("the file ends inside a frame")
        return 0
      self._unpack()
    count = min(len(target), len(self._output))
    target[:count] = self._output[:count]
    self._output = self._output[count:]
    return count

  def close(self) -> None:
    """Closes the file."""
    self._packed.close()
    super().close()

  def _unpack(self):
    if self._frame is None:
      self._frame = self._library.ZstdDecompressor().decompressobj()
    try:
      self._output = memoryview(self._frame.decompress(self._input))
    except self._library.ZstdError as error:
      raise EOFError(str(error)) from error
    self._input = b""
    if self._frame.eof:
      self._input = self._frame.unused_data
      self._frame = None
