"""What is done with lines, rows and files of input that hold no text."""

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

OnError = Literal["stop", "skip"]
ON_ERROR: tuple[OnError, ...] = ("stop", "skip")


class BadTextError(ValueError):
  """A line, row or file that holds no text.

  Attributes:
    reason: kind of the problem, for counts: "not JSON".
    detail: what else the message says, with its punctuation.
  """

  def __init__(self, where: str, reason: str, detail: str = ""):
    super().__init__(where, reason, detail)  # as pickle makes it again
    self.reason, self.detail = reason, detail

  def __str__(self) -> str:
    return "{}: {}{}".format(*self.args)


# Called with the name of a document that cannot be read, and why.
OnBad = Callable[[str, BadTextError], None]


def stop(name: str, problem: BadTextError) -> None:
  """Ends the reading with the error."""
  raise problem


def skip_or_stop(on_error: str, skip: Callable[[str, str, str], None]) -> OnBad:
  """What to do with bad text: call `skip(name, reason, detail)`, or stop.

  Raises:
    ValueError: `on_error` is none of `ON_ERROR`.
  """
  if on_error not in ON_ERROR:
    raise ValueError(f"on_error={on_error!r} must be one of {ON_ERROR}")
  if on_error == "stop":
    return stop
  return lambda name, problem: skip(name, problem.reason, problem.detail)


def count_or_stop(on_error: str, counts: Counter[str]) -> OnBad:
  """As `skip_or_stop`; what is skipped is counted by its reason."""
  return skip_or_stop(on_error, lambda _, reason, __: counts.update([reason]))


@contextlib.contextmanager
def damage(where: str, *errors: type[Exception]) -> Iterator[None]:
  """Turns errors that the content of a file causes into `BadTextError`.

  Errors of the disk or the network have a number and stay as they are: what is
  there later must not count as damaged.

  Args:
    where: the place, for the message.
    *errors: further types that a library raises.
  """
  try:
    yield
  except (EOFError, OSError, zlib.error, *errors) as error:
    if getattr(error, "errno", None) is not None:
      raise
    raise BadTextError(where, "damaged or truncated", f": {error}") from error
