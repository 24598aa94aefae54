"""A file of prompts, one a row."""

import hashlib
from collections.abc import Iterator

from moh_jax.data.text.files import read_documents
from moh_jax.data.text.pieces import file_format, list_pieces

FIELD = "prompt"
_ONE_PIECE = 1 << 62  # bytes; files are read one after another


class Prompts:
  """The prompts of a file, read again whenever they are iterated.

  Attributes:
    sha256: of the texts, in order.
  """

  def __init__(self, file: str):
    """Reads the file once, so that mistakes in it are known before the work.

    Args:
      file: rows with the field "prompt", in any form that `read_documents`
        reads but plain text, whose lines could be meant in several ways.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it cannot be read.
      ValueError: it is plain text, a row has no prompt (the message names the
        line), or there is none.
    """
    groups = list_pieces([file], _ONE_PIECE)
    self._pieces = [piece for group in groups for piece in group]
    for piece in self._pieces:
      if file_format(piece.file)[0] == "text":
        raise ValueError(
          f"{piece.file}: plain text is not taken as prompts; write a file "
          '.jsonl with one JSON object a line, such as {"prompt": "TEXT"}'
        )
    digest, self._count = hashlib.sha256(), 0
    for text in self:
      content = text.encode()
      digest.update(len(content).to_bytes(8, "little") + content)
      self._count += 1
    if not self._count:
      raise ValueError(f"{file}: holds no prompt")
    self.sha256 = digest.hexdigest()

  def __len__(self) -> int:
    return self._count

  def __iter__(self) -> Iterator[str]:
    for piece in self._pieces:
      for _, text in read_documents(piece, FIELD):
        yield text
