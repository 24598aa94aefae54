import pathlib
import platform
import tempfile
from unittest import mock

from absl.testing import absltest

from moh_jax.config.data import TextDataConfig
from moh_jax.data import sequences
from moh_jax.data import stdlib as stdlib_text
from tests.data import tiny_text

_FILES = {
  "abc.py": "import re\n" * 30,
  "asyncio/tasks.py": "async def f():\r\n  pass\r\n" * 30,
  "bad.py": b"\xff\xfe",
  "collections/abc.py": "class A:\n  x = 'é'\n" * 30,
  "email/message.py": "def parse(text):\n  return text\n" * 30,
  "email/__pycache__/x.py": "left out",
  "empty.py": "",
  "idlelib/idle_test/a.py": "left out",
  "json/decoder.py": "def decode(s):\n  return s\n" * 30,
  "lib2to3/tests/a.py": "left out",
  "logging/config.py": "def configure():\n  pass\n" * 30,
  "my/json/a.py": "def train():\n  pass\n" * 30,
  "site-packages/a.py": "left out",
  "test/a.py": "left out",
  "data.txt": "left out",
}
_HELD_OUT = (
  "asyncio/tasks.py",
  "email/message.py",
  "json/decoder.py",
  "logging/config.py",
)
_TRAIN = ("abc.py", "collections/abc.py", "my/json/a.py")


class StdlibTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.library, self.out = root / "lib", root / "out"
    for name, content in _FILES.items():
      path = self.library / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
      )
    patch = mock.patch("sysconfig.get_path", return_value=str(self.library))
    self.get_path = self.enterContext(patch)

  def test_files_are_documents_of_their_part(self):
    for tokenizer, name in (("bytes", "bytes"), ("bpe", "bpe300")):
      folder = stdlib_text.prepare(self.out, tokenizer, 300)
      self.assertEqual(folder, self.out / name)
      expected = [_FILES[name] for name in _TRAIN]
      self.assertEqual(tiny_text.texts(folder / "train"), expected)
      expected = [_FILES[name] for name in _HELD_OUT]
      self.assertEqual(tiny_text.texts(folder / "val"), expected)
      self.assertCountEqual(
        folder.iterdir(), [folder / "train", folder / "val"]
      )

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

  def test_is_a_source_of_training(self):
    data = TextDataConfig(
      source="stdlib", path=str(self.out), sequence_length=16
    )
    stream = sequences.Text(data, 300, "train").stream(0)
    self.assertEqual(stream[0]["inputs"].shape, (16,))
    held_out = sequences.Text(data, 300, "val")
    self.assertIn("xz_bytes", held_out.notes)
    size = sum(len(_FILES[name].encode()) for name in _HELD_OUT)
    self.assertEqual(held_out.text_bytes, size)
    tokenizer = sequences.Text(data, 300, "train").tokenizer
    self.assertLessEqual(tokenizer.vocab_size, 300)


if __name__ == "__main__":
  absltest.main()
