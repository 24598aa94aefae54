import json
import os
import signal
import subprocess
import sys
import textwrap
import time

from absl.testing import absltest, parameterized

from moh_jax.data import shard_writer, tokenize, tokenizers
from tests.data import tiny_text
from tests.data.folder import FolderTest

# Every batch takes a while, so that a kill meets unfinished work.
_SLOW_RUN = """
import sys, time
from moh_jax.data.tokenize import tokenize
from moh_jax.data.tokenizers import BytesTokenizer

class Slow(BytesTokenizer):
  def encode_batch(self, texts):
    time.sleep(0.1)
    return super().encode_batch(texts)

if __name__ == "__main__":
  source, out, workers = sys.argv[1:]
  tokenize([source], Slow(), out, "all", piece_bytes=2000,
           workers=int(workers))
"""


class _Dying(tokenizers.BytesTokenizer):
  """Ends its process as the system does where memory is short."""

  def encode_batch(self, texts):
    os._exit(1)


class _FilesTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.texts = [f"document {i} " + "é" * (i % 50) for i in range(200)]
    lines = [json.dumps({"text": text}) + "\n" for text in self.texts]
    (self.root / "in.jsonl").write_text("".join(lines))

  def _run(self, name, tokenizer=None, split="all", **options):
    options = {"piece_bytes": 2000, **options}
    return tokenize.tokenize(
      [str(self.root / "in.jsonl")],
      tokenizer or tokenizers.BytesTokenizer(),
      self.root / name,
      split,
      **options,
    )[split]

  def _files(self, name):
    folder = self.root / name
    return {
      p.relative_to(folder): p.read_bytes()
      for p in folder.rglob("*")
      if p.is_file()
    }

  def _skipped(self, name, split="all"):
    lists = sorted((self.root / name / split / "skipped").glob("*.txt"))
    return "".join(file.read_text() for file in lists)

  def _texts(self, name, split="all"):
    return tiny_text.texts(self.root / name / split)


class TokenizeTest(_FilesTest):
  def test_process_that_dies_is_an_error(self):
    with self.assertRaisesRegex(OSError, "with fewer workers"):
      self._run("out", _Dying(), workers=2)

  def test_killed_run_continues_to_the_same_bytes(self):
    self._run("whole")
    script = self.root / "run.py"
    script.write_text(textwrap.dedent(_SLOW_RUN))
    out = self.root / "killed"
    process = subprocess.Popen(
      [
        sys.executable,
        script,
        self.root / "in.jsonl",
        out,
        "2",
      ],
      env={**os.environ, "PYTHONPATH": os.getcwd()},
      start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(out.glob("all/*.array_record"))) < 2:
      self.assertLess(time.monotonic(), deadline)
      self.assertIsNone(process.poll())
      time.sleep(0.01)
    process.send_signal(signal.SIGKILL)  # itself, not its workers
    process.wait()
    self._wait_for_session_end(process.pid, deadline)
    written = {p: p.stat().st_mtime_ns for p in out.glob("all/*.array_record")}
    self.assertFalse((out / "all/metadata.json").exists())
    self._run("killed")
    self.assertEqual(self._files("killed"), self._files("whole"))
    for path, time_ns in written.items():
      self.assertEqual(path.stat().st_mtime_ns, time_ns)

  def _wait_for_session_end(self, session, deadline):
    """Waits until the workers of a killed process have left too."""
    while True:
      try:
        os.killpg(session, 0)
      except ProcessLookupError:
        return
      self.assertLess(time.monotonic(), deadline)
      time.sleep(0.01)

  def test_other_input_or_options_are_refused(self):
    self._run("out")
    with self.assertRaisesRegex(ValueError, "field: 'body' here, 'text' there"):
      self._run("out", field="body")
    with (self.root / "in.jsonl").open("a") as file:
      file.write('{"text": "more"}\n')
    with self.assertRaisesRegex(ValueError, "inputs: 'sha256"):
      self._run("out")

  def test_empty_documents_are_skipped_and_listed(self):
    with (self.root / "in.jsonl").open("a") as file:
      file.write('{"text": ""}\n{"text": null}\n{"text": "last"}\n')
    metadata = self._run("out")
    self.assertEqual((metadata["documents"], metadata["skipped"]), (201, 2))
    self.assertEqual(
      self._skipped("out"),
      "in.jsonl:201: empty\nin.jsonl:202: empty\n",
    )
    self.assertEqual(self._texts("out")[-1], "last")


class _FullDisk(tokenizers.BytesTokenizer):
  """Fails after some batches."""

  def __init__(self, batches):
    self.left = batches

  def encode_batch(self, texts):
    self.left -= 1
    if self.left < 0:
      raise OSError("full")
    return super().encode_batch(texts)


class SplitsTest(_FilesTest):
  def _split(self, share, name="out", tokenizer=None, **options):
    return tokenize.tokenize(
      [str(self.root / options.pop("files", "in.jsonl"))],
      tokenizer or tokenizers.BytesTokenizer(),
      self.root / name,
      held_out=share,
      piece_bytes=2000,
      **options,
    )

  def _parts(self, name, *inputs):
    """The part of each document."""
    tokenize.tokenize(
      [str(path) for path in inputs],
      tokenizers.BytesTokenizer(),
      self.root / name,
      held_out=0.3,
    )
    return {
      text: split
      for split in ("train", "val")
      for text in self._texts(name, split)
    }

  def test_part_of_a_document_does_not_depend_on_names_or_other_files(self):
    for folder, start in (("x/y", 0), ("x/z", 40), ("w", 80)):
      (self.root / folder).mkdir(parents=True)
      for i in range(start, start + 40, 4):
        texts = [f"text {j}" for j in range(i, i + 4)]
        (self.root / folder / f"{i}.txt").write_text(texts.pop())
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts)
        (self.root / folder / f"{i}.jsonl").write_text(lines)
    expected = self._parts("one", self.root / "x/y/*")
    self.assertLen(expected, 40)
    self.assertLen(set(expected.values()), 2)
    os.symlink(self.root / "x", self.root / "link")
    for number, inputs in enumerate(
      (
        [self.root / "x/y/*", self.root / "x/z/*"],
        [self.root / "x/**/*"],
        [self.root / "w/80.txt", self.root / "x/y/*"],
        [os.path.relpath(self.root / "x/y/*")],
        [self.root / "link/y/*"],
      )
    ):
      found = self._parts(f"{number}", *inputs)
      self.assertEqual(found, found | expected)
    (self.root / "x/y").rename(self.root / "v")
    self.assertEqual(self._parts("renamed", self.root / "v/*"), expected)

  def test_interrupted_run_continues_to_the_same_bytes(self):
    whole = self._split(0.2, "whole")
    with self.assertRaisesRegex(OSError, "full"):
      self._split(0.2, tokenizer=_FullDisk(3))
    written = sorted((self.root / "out").glob("*/*.array_record"))
    self.assertLen(written, 6)
    # As where it was killed between the two shards of a group.
    written.pop(0).unlink()
    times = [path.stat().st_mtime_ns for path in written]
    self.assertEqual(self._split(0.2), whole)
    self.assertEqual(self._files("out"), self._files("whole"))
    self.assertEqual([path.stat().st_mtime_ns for path in written], times)

  @parameterized.parameters(
    ("in.jsonl", 1e-9, "val", 1),
    ("*.txt", 0.9, "train", 1),  # the hash puts all five into val
    ("*.txt", 0.005, "val", 1),  # and here into train
    ("*.txt", 0.5, "val", 2),
  )
  def test_each_part_gets_a_document(self, files, share, split, documents):
    for name in "abcde":
      (self.root / f"{name}.txt").write_text(name)
    metadata = self._split(share, files=files)
    self.assertEqual(metadata[split]["documents"], documents)
    total = sum(entry["documents"] for entry in metadata.values())
    self.assertEqual(total, 200 if files == "in.jsonl" else 5)
    self.assertEqual(self._split(share, files=files), metadata)

  @parameterized.parameters("in.jsonl", "one.txt")
  def test_one_document_cannot_be_divided(self, name):
    content = '{"text": ""}\n{"text": "a"}\n' if name == "in.jsonl" else "a"
    (self.root / name).write_text(content)
    for share in (0.2, 0.99):
      with self.assertRaisesRegex(
        ValueError,
        "^the input has 1 document, and documents are not cut; tokenize other "
        "files with --split val, and this one with --split train$",
      ):
        self._split(share, files=name)
    self.assertEmpty(self._files("out"))


_BROKEN = (
  (b'{"text": "b"', "not JSON"),
  (b"[" * 3000, "not JSON"),
  (b'{"body": "b"}', "no field 'text'"),
  (b'{"text": 1}', "'text' is int, expected text"),
  (b'{"text": "\xff"}', "not UTF-8"),
  (b'{"text": "\\ud800"}', "half a surrogate pair"),
)


class SkipTest(_FilesTest):
  """A crawl of which some lines are broken."""

  def setUp(self):
    super().setUp()
    lines, self.clean, self.bad = [], [], []
    for i in range(3000):
      line = json.dumps({"text": f"document {i} " + "é" * (i % 50)}).encode()
      if i % 100 == 37:
        line, reason = _BROKEN[i // 100 % len(_BROKEN)]
        self.bad.append((i + 1, reason))
        self.clean.append(b" " * len(line))  # a blank line is no document
      else:
        self.clean.append(line)
      lines.append(line)
    self.crawl = b"\n".join(lines) + b"\n"

  def _write(self, lines, name="in.jsonl"):
    (self.root / name).write_bytes(b"\n".join(lines) + b"\n")

  def _tokenize(self, out, on_error="skip", name="in.jsonl", **options):
    options = {
      "held_out": 0.2,
      "tokenizer": tokenizers.BytesTokenizer(),
      "piece_bytes": 20_000,
    } | options
    return tokenize.tokenize(
      [str(self.root / name)],
      out=self.root / out,
      on_error=on_error,
      **options,
    )

  def _data(self, name):
    return {
      path: content
      for path, content in self._files(name).items()
      if path.suffix in (".array_record", ".npy")
    }

  def _log(self, name):
    lines = [
      line
      for split in ("train", "val")
      for line in self._skipped(name, split).splitlines()
    ]
    return sorted(lines, key=lambda line: int(line.split(":")[1]))

  @parameterized.parameters(1, 2)
  def test_the_set_is_that_of_the_clean_lines(self, workers):
    self._write(self.clean)
    clean = self._tokenize("clean", "stop")
    (self.root / "in.jsonl").write_bytes(self.crawl)
    found = self._tokenize("crawl", workers=workers)
    self.assertEqual(self._data("crawl"), self._data("clean"))
    self.assertGreater(len(self._data("crawl")), 10)
    log = self._log("crawl")
    self.assertLen(log, 30)
    for line, (number, reason) in zip(log, self.bad):
      self.assertStartsWith(line, f"in.jsonl:{number}: {reason}")
    for split in ("train", "val"):
      told = shard_writer.describe_skipped(found[split]["shards"])
      lines = self._skipped("crawl", split).splitlines()
      self.assertStartsWith(told, f"{len(lines)} skipped (")
      self.assertEqual(found[split]["skipped"], len(lines))
      self.assertEqual(clean[split]["skipped"], 0)
      self.assertEqual(found[split]["documents"], clean[split]["documents"])

  def test_a_run_that_met_a_bad_line_may_skip_it(self):
    lines = self.crawl.split(b"\n")
    lines[37] = lines[137] = b""  # the first piece is without them
    self._write(lines)
    options = {"held_out": None}
    with self.assertRaisesRegex(ValueError, "line 238: no field 'text'"):
      self._tokenize("out", "stop", **options)
    self.assertNotEmpty(list((self.root / "out").rglob("*.array_record")))
    self._tokenize("out", **options)
    self._tokenize("whole", **options)
    self.assertEqual(self._files("out"), self._files("whole"))
    self.assertLen(self._skipped("out", "train").splitlines(), 28)


if __name__ == "__main__":
  absltest.main()
