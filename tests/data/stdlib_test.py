import platform
from unittest import mock

from absl.testing import absltest

from moh_jax.data import stdlib as stdlib_text
from moh_jax.data.token_sets import TokenSet
from tests.data import tiny_text
from tests.data.folder import FolderTest

_TRAIN = ("abc.py", "collections/abc.py", "my/json/a.py")
_HELD_OUT = (
  "asyncio/tasks.py",
  "email/message.py",
  "json/decoder.py",
  "logging/config.py",
)
_FILES = {name: f"import {name}  # é\r\n" * 30 for name in _TRAIN + _HELD_OUT}
_LEFT_OUT = (
  *("email/__pycache__/x.py", "idlelib/idle_test/a.py", "test/a.py"),
  *("lib2to3/tests/a.py", "site-packages/a.py", "data.txt"),
)
_OTHERS = {"bad.py": b"\xff\xfe", "empty.py": b""}


class StdlibTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.library, self.out = self.root / "lib", self.root / "out"
    known = {name: text.encode() for name, text in _FILES.items()}
    for name, content in (
      known | dict.fromkeys(_LEFT_OUT, b"x") | _OTHERS
    ).items():
      path = self.library / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)
    patch = mock.patch("sysconfig.get_path", return_value=str(self.library))
    self.enterContext(patch)

  def test_files_are_documents_of_their_part(self):
    for tokenizer, name in (("bytes", "bytes"), ("bpe", "bpe300")):
      folder = stdlib_text.prepare(self.out, tokenizer, 300)
      self.assertEqual(folder, self.out / name)
      for split, names in (("train", _TRAIN), ("val", _HELD_OUT)):
        expected = [_FILES[name] for name in names]
        self.assertEqual(tiny_text.texts(folder / split), expected)
      self.assertLen(list(folder.iterdir()), 2)
    notes = TokenSet(folder / "val").metadata["notes"]
    self.assertCountEqual(notes, ["python", "gzip_bytes", "xz_bytes"])

  def test_set_of_another_python_is_told(self):
    with self.assertNoLogs(level="WARNING"):
      stdlib_text.prepare(self.out, "bytes", 257)
    with (
      mock.patch("platform.python_version", return_value="3.99.1"),
      self.assertLogs(level="WARNING") as logs,
    ):
      for _ in range(2):
        stdlib_text.prepare(self.out, "bytes", 257)
    (line,) = logs.output
    made_by = platform.python_version()
    self.assertIn(f"sources of Python {made_by}, this is Python 3.99.1", line)


if __name__ == "__main__":
  absltest.main()
