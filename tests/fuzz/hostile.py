"""Damaged and hostile input, and what readers may answer to it.

`MOH_JAX_FUZZ=N` tries N examples of each test, at random, in place of the few
that the marker `fuzz` always tries.
"""

import copy
import functools
import json
import os
import pathlib
import resource
import tempfile
import warnings

import hypothesis
import pytest
from absl.testing import absltest
from hypothesis import strategies as st

_EXAMPLES = int(os.environ.get("MOH_JAX_FUZZ", "0"))
_MOST_MEMORY = 1 << 30
_MOST_SECONDS = 20
# What a reader raises for bad input; `cli.main` prints it as one line.
_REFUSALS = (ValueError, OSError, NotImplementedError)

_EXTREMES = (b"\x00", b"\xff", b"\x7f", b"\x80")
_DEEP = functools.reduce(lambda inner, _: [inner], range(500), [])
# Values that stand where a file has another.
_NUMBERS = (0, -1, 1, 3, 2**31, 2**60, -(2**63), 10**30, 0.5, 1e30, 1e308)
_PATHS = ("..", "../evil", "/etc/passwd", "a/b")
_TEXTS = ("", "x", *_PATHS, "\0", "\udcff", "none")
_LISTS = ([], [0], [-1], [None], ["x"], [[]], [2**60] * 3, [1] * 2000, _DEEP)
_OTHERS = (None, True, False, {}, {"": {}}, {"x": 1}, "9" * 400)
VALUES = st.sampled_from((*_NUMBERS, *_TEXTS, *_LISTS, *_OTHERS))
# Files that are hostile whatever they should hold.
_WILD = (b"[" * 200_000, b'{"a":' * 100_000, b"", b"\xff\xfe", b"NaN", b"1e999")


def examples(few: int = 30):
  """Decorates a test: `few` examples, or what the environment asks for."""
  settings = hypothesis.settings(
    max_examples=_EXAMPLES or few,
    derandomize=not _EXAMPLES,
    deadline=_MOST_SECONDS * 1000,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  return lambda test: pytest.mark.fuzz(settings(test))


@st.composite
def damaged(draw, content: bytes):
  """Some bytes of a file changed, left out, repeated or made extreme."""
  content = bytearray(content)
  for _ in range(draw(st.integers(1, 4))):
    size = len(content)
    at = draw(st.integers(0, max(0, size - 1)))
    kind = draw(st.integers(0, 5))
    if kind == 0 and size:
      content[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == 1:
      del content[at:]
    elif kind == 2:
      count = draw(st.sampled_from((1, 2, 4, 8)))
      content[at : at + count] = draw(st.sampled_from(_EXTREMES)) * count
    elif kind == 3:
      content[at:at] = draw(st.binary(max_size=16))
    elif kind == 4:
      del content[at : at + draw(st.integers(1, 64))]
    else:
      content[at:at] = content[at : at + draw(st.integers(1, 64))]
  return bytes(content)


@st.composite
def altered(draw, value):
  """A JSON value with some parts replaced, left out or renamed."""
  value = copy.deepcopy(value)
  for _ in range(draw(st.integers(1, 3))):
    parent, key = None, None
    part = value
    while isinstance(part, dict | list) and part:
      keys = list(part) if isinstance(part, dict) else list(range(len(part)))
      parent, key = part, draw(st.sampled_from(keys))
      part = parent[key]
      if draw(st.integers(0, 3)) == 0:
        break
    if parent is None:
      return copy.deepcopy(draw(VALUES))
    kind = draw(st.integers(0, 5))
    if kind == 0:
      del parent[key]
    elif kind == 1 and isinstance(parent, dict):
      parent[draw(st.sampled_from(("", "x", "../x", "\0")))] = parent.pop(key)
    else:
      parent[key] = copy.deepcopy(draw(VALUES))
  return value


@st.composite
def json_files(draw, value):
  """The bytes of a JSON file: altered as a value, or damaged as a file."""
  if draw(st.booleans()):
    value = draw(altered(value))
    return json.dumps(value).encode("utf-8", "surrogatepass")
  content = json.dumps(value).encode()
  return draw(st.one_of(damaged(content), st.sampled_from(_WILD)))


class ReaderTest(absltest.TestCase):
  """A folder for files, and the check of what a reader does with them."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    cls.folder = pathlib.Path(folder.name)
    cls.before = _peak()

  def setUp(self):
    super().setUp()
    # A library may warn of what it then refuses.
    self.enterContext(warnings.catch_warnings())
    warnings.simplefilter("ignore")

  def write(self, name, content):
    """Writes a file of the folder and returns its path."""
    file = self.folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file

  def check(self, read, *args):
    """Calls a reader: it returns, or refuses in one line.

    Any other error fails the test by itself, as does a slow example.
    """
    try:
      read(*args)
    except _REFUSALS as error:
      text = str(error)
      self.assertTrue(text, repr(error))
      self.assertLess(len(text), 20_000)
    self.assertLess(_peak() - self.before, _MOST_MEMORY)


def _peak() -> int:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
