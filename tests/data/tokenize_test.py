"""Sets of files of text: the same bytes however a run goes."""

import gzip
import json
import os
import platform
import signal
import subprocess
import sys
import time
from unittest import mock

import zstandard
from absl.testing import parameterized

from moh_jax.data import stdlib, tokenize
from moh_jax.data.token_sets import TokenSet
from moh_jax.data.tokenizers import BytesTokenizer
from tests.data import tiny_text
from tests.folders import FolderTest

# Every batch takes a while, so that a kill meets unfinished work.
_SLOW_RUN = """
import sys
from moh_jax.data.tokenize import tokenize
from tests.data.tokenize_test import Slow

source, out = sys.argv[1:]
tokenize([source], Slow(), out, held_out=0.2, piece_bytes=2000, workers=2)
"""


class Slow(BytesTokenizer):
  def encode_batch(self, texts):
    time.sleep(0.1)
    return super().encode_batch(texts)


class _Dying(BytesTokenizer):
  """Ends its process as the system does where memory is short."""

  def encode_batch(self, texts):
    os._exit(1)


class _FilesTest(FolderTest):
  def setUp(self):
    super().setUp()
    self._write_lines(f"document {i} " + "é" * (i % 50) for i in range(200))

  def _write_lines(self, texts, name="in.jsonl", mode="w"):
    path = self.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
      file.writelines(json.dumps({"text": text}) + "\n" for text in texts)

  def _run(self, name, tokenizer=None, inputs=("in.jsonl",), **options):
    if "held_out" not in options:
      options["split"] = "all"
    options = {"piece_bytes": 2000, **options}
    inputs = [str(self.root / path) for path in inputs]
    tokenizer = tokenizer or BytesTokenizer()
    return tokenize.tokenize(inputs, tokenizer, self.root / name, **options)

  def _files(self, name, *suffixes):
    folder = self.root / name
    return {
      p.relative_to(folder): p.read_bytes()
      for p in folder.rglob("*")
      if p.is_file() and (not suffixes or p.suffix in suffixes)
    }

  def _skipped(self, name, split="all"):
    file = self.root / name / split / "skipped.txt"
    return file.read_text().splitlines() if file.exists() else []

  def _texts(self, name, split="all"):
    return tiny_text.texts(self.root / name / split)


class ContinuedTest(_FilesTest):
  def test_process_that_dies_is_an_error(self):
    with self.assertRaisesRegex(OSError, "with fewer workers"):
      self._run("out", _Dying(), workers=2)

  def test_killed_run_continues_to_the_same_bytes(self):
    whole = self._run("whole", held_out=0.2)
    source, out = self.root / "in.jsonl", self.root / "killed"
    process = subprocess.Popen(
      [sys.executable, "-c", _SLOW_RUN, source, out], start_new_session=True
    )
    deadline = time.monotonic() + 60

    def wait():
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.01)

    while len(list(out.glob("*/*.array_record"))) < 4:
      self.assertIsNone(process.poll())
      wait()
    process.send_signal(signal.SIGKILL)  # itself, not its workers
    process.wait()
    with self.assertRaises(ProcessLookupError):  # its workers have left too
      while True:
        os.killpg(process.pid, 0)
        wait()
    self.assertEmpty(list(out.glob("*/metadata.json")))
    first, *written = sorted(out.glob("*/*.array_record"))
    first.unlink()  # as where it was killed between the two shards of a group
    times = [path.stat().st_mtime_ns for path in written]
    self.assertEqual(self._run("killed", held_out=0.2), whole)
    self.assertEqual(self._files("killed"), self._files("whole"))
    self.assertEqual([path.stat().st_mtime_ns for path in written], times)

  def test_other_input_or_options_are_refused(self):
    self._run("out")
    with self.assertRaisesRegex(ValueError, "field: 'body' here, 'text' there"):
      self._run("out", field="body")
    self._write_lines(["more"], mode="a")
    with self.assertRaisesRegex(ValueError, "inputs: 'sha256"):
      self._run("out")


class SplitsTest(_FilesTest):
  def _parts(self, name, *inputs):
    """The part of each document."""
    self._run(name, inputs=inputs, held_out=0.3)
    return {
      text: split
      for split in ("train", "val")
      for text in self._texts(name, split)
    }

  def test_part_of_a_document_does_not_depend_on_names_or_other_files(self):
    for folder, start in (("x/y", 0), ("x/z", 40)):
      for i in range(start, start + 40, 4):
        texts = [f"text {j}" for j in range(i, i + 3)]
        self._write_lines(texts, f"{folder}/{i}.jsonl")
        (self.root / folder / f"{i}.txt").write_text(f"text {i + 3}")
    expected = self._parts("one", "x/y/*")
    self.assertLen(expected, 40)
    self.assertLen(set(expected.values()), 2)
    (self.root / "x").rename(self.root / "v")
    found = self._parts("all", "v/**/*")
    self.assertEqual(found, found | expected)

  @parameterized.parameters(
    ("in.jsonl", 1e-9, "val", 1),
    ("*.txt", 0.9, "train", 1),  # the hash puts all five into val
    ("*.txt", 0.005, "val", 1),  # and here into train
    ("*.txt", 0.5, "val", 2),
  )
  def test_each_part_gets_a_document(self, files, share, split, documents):
    for name in "abcde":
      (self.root / f"{name}.txt").write_text(name)
    metadata = self._run("out", inputs=[files], held_out=share)
    self.assertEqual(metadata[split]["documents"], documents)
    total = sum(entry["documents"] for entry in metadata.values())
    self.assertEqual(total, 200 if files == "in.jsonl" else 5)
    again = self._run("out", inputs=[files], held_out=share)
    self.assertEqual(again, metadata)

  @parameterized.parameters(
    ("a\nb\nc\nd\n", 0.25, "a\nb\nc\n", "d\n"),
    ("a\nbbbb\nc", 0.2, "a\n", "bbbb\nc"),
    ("aaaa\nbbbbbbb", 0.3, "aaaa\n", "bbbbbbb"),  # cut at a line all the same
    ("aaaaaaaaa\nb", 0.9, "aaaaaaaaa\n", "b"),
  )
  def test_last_lines_of_one_file_are_held_out(self, text, share, head, tail):
    (self.root / "one.txt").write_text(text)
    (self.root / "none.txt").write_text("")
    found = self._run("out", inputs=["*.txt"], held_out=share, on_error="skip")
    for split, part in (("train", head), ("val", tail)):
      self.assertEqual(self._texts("out", split), [part])
      self.assertEqual(found[split]["text_bytes"], len(part))
    again = self._run("out", inputs=["*.txt"], held_out=share, on_error="skip")
    self.assertEqual(again, found)

  @parameterized.parameters(("in.jsonl", 0.2), ("one.txt", 0.99))
  def test_one_line_cannot_be_divided(self, name, share):
    self._write_lines(["", "a"])
    (self.root / "one.txt").write_text("a")
    with self.assertRaisesRegex(ValueError, "1 document.* --split val.*train"):
      self._run("out", inputs=[name], held_out=share)
    self.assertEmpty(self._files("out"))


_BROKEN = (
  (b"[" * 3000, "not JSON"),
  (b'{"text": 1}', "'text' is int, expected"),
)


class SkipTest(_FilesTest):
  """A crawl of which some lines are broken."""

  def setUp(self):
    super().setUp()
    self.crawl, self.clean, self.bad = [], [], []
    for i in range(1500):
      line = json.dumps({"text": f"document {i} " + "é" * (i % 50)}).encode()
      clean = line
      if i % 50 == 37:
        line, reason = _BROKEN[i // 50 % len(_BROKEN)]
        self.bad.append((i + 1, reason))
        clean = b" " * len(line)  # a blank line is no document
      self.crawl.append(line)
      self.clean.append(clean)

  def _skip(self, out, lines=None, on_error="skip", **options):
    if lines is not None:
      (self.root / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    options = {"piece_bytes": 10_000, **options}
    return self._run(out, on_error=on_error, **options)

  def test_the_set_is_that_of_the_clean_lines(self):
    clean = self._skip("clean", self.clean, "stop", held_out=0.2)
    expected = self._files("clean", ".array_record", ".npy")
    self.assertGreater(len(expected), 10)
    for workers in (1, 2):
      out = f"crawl{workers}"
      found = self._skip(out, self.crawl, held_out=0.2, workers=workers)
      self.assertEqual(self._files(out, ".array_record", ".npy"), expected)
      listed = {split: self._skipped(out, split) for split in found}
      log = [line for lines in listed.values() for line in lines]
      log.sort(key=lambda line: int(line.split(":")[1]))
      self.assertLen(log, 30)
      for line, (number, reason) in zip(log, self.bad):
        self.assertStartsWith(line, f"in.jsonl:{number}: {reason}")
      for split, lines in listed.items():
        self.assertEqual(found[split]["skipped"], len(lines))
        self.assertEqual(clean[split]["skipped"], 0)
        documents = clean[split]["documents"]
        self.assertEqual(found[split]["documents"], documents)

  def test_a_run_that_met_a_bad_line_may_skip_it(self):
    lines = self.crawl
    lines[37] = lines[87] = b""  # the first piece is without them
    with self.assertRaisesRegex(ValueError, "line 138: not JSON"):
      self._skip("out", lines, "stop")
    self.assertNotEmpty(list((self.root / "out").rglob("*.array_record")))
    self._skip("out")
    self._skip("whole")
    self.assertEqual(self._files("out"), self._files("whole"))
    self.assertLen(self._skipped("out"), 28)

  @parameterized.parameters("other.jsonl.gz", "other.jsonl.zst")
  def test_a_damaged_file_ends_the_run(self, name):
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    content = pack(b"\n".join(self.clean))
    for end in (len(content) // 2, 1):
      (self.root / name).write_bytes(content[:end])
      with self.assertRaisesRegex(ValueError, f"{name}, line .*: damaged or t"):
        self._skip(f"out{end}", self.crawl, inputs=["*.jsonl*"])

  def test_empty_documents_are_skipped_and_listed(self):
    self._write_lines(["", None, "last"], mode="a")
    metadata = self._run("out")["all"]
    self.assertEqual((metadata["documents"], metadata["skipped"]), (201, 2))
    listed = ["in.jsonl:201: empty", "in.jsonl:202: empty"]
    self.assertEqual(self._skipped("out"), listed)
    self.assertEqual(self._texts("out")[-1], "last")


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
      folder = stdlib.prepare(self.out, tokenizer, 300)
      self.assertEqual(folder, self.out / name)
      for split, names in (("train", _TRAIN), ("val", _HELD_OUT)):
        expected = [_FILES[name] for name in names]
        self.assertEqual(tiny_text.texts(folder / split), expected)
      self.assertLen(list(folder.iterdir()), 2)
    notes = TokenSet(folder / "val").metadata["notes"]
    self.assertCountEqual(notes, ["python", "gzip_bytes", "xz_bytes"])

  def test_set_of_another_python_is_told(self):
    with self.assertNoLogs(level="WARNING"):
      stdlib.prepare(self.out, "bytes", 257)
    with (
      mock.patch("platform.python_version", return_value="3.99.1"),
      self.assertLogs(level="WARNING") as logs,
    ):
      for _ in range(2):
        stdlib.prepare(self.out, "bytes", 257)
    (line,) = logs.output
    made_by = platform.python_version()
    self.assertIn(f"sources of Python {made_by}, this is Python 3.99.1", line)
