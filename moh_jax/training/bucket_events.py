"""Tensorboard's event files in buckets, through the library that epath uses.

tensorboardX's own writer for gs:// wants a package that the extra `gcs` does
not install.
"""

from etils import epath


class _EventFile:
  """An event file that is kept in memory and written whole at each flush.

  Objects of a bucket cannot be appended to. tensorboardX flushes every two
  minutes, and at the end.
  """

  def __init__(self, path: str):
    self._path, self._content, self._written = epath.Path(path), bytearray(), 0

  def write(self, content: bytes) -> None:
    """Adds what the next flush writes."""
    self._content += content

  def flush(self) -> None:
    """Writes the file if anything was added."""
    if len(self._content) > self._written:
      self._path.write_bytes(bytes(self._content))
      self._written = len(self._content)

  def close(self) -> None:
    """Writes what is not written yet."""
    self.flush()


class _Factory:
  """What tensorboardX calls for paths with the prefix."""

  def open(self, path: str) -> _EventFile:
    return _EventFile(path)

  def directory_check(self, path: str) -> None:
    """Buckets have no directories."""


def register(workdir: epath.Path) -> None:
  """Makes tensorboardX write to the bucket of `workdir`, if it is in one."""
  from tensorboardX import record_writer

  scheme, separator, _ = str(workdir).partition("://")
  if separator:
    record_writer.register_writer_factory(scheme, _Factory())
