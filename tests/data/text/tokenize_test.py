import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.data.text import tokenize, tokenizers
from moh_jax.data.text.token_sets import TokenSet
from tests.data.text import tiny_text

# Every batch takes a while, so that a kill meets unfinished work.
_SLOW_RUN = """
import sys, time
from moh_jax.data.text.tokenize import tokenize
from moh_jax.data.text.tokenizers import BytesTokenizer

class Slow(BytesTokenizer):
  def encode_batch(self, texts):
    time.sleep(0.1)
    return super().encode_batch(texts)

if __name__ == "__main__":
  source, out, workers = sys.argv[1:]
  tokenize([source], Slow(), out, {"all": None}, piece_bytes=2000,
           workers=int(workers), progress=False)
"""


class _Dying(tokenizers.BytesTokenizer):
  """Ends its process as the system does where memory is short."""

  def encode_batch(self, texts):
    os._exit(1)


class _FilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.texts = [f"document {i} " + "é" * (i % 50) for i in range(200)]
    lines = [json.dumps({"text": text}) + "\n" for text in self.texts]
    (self.root / "in.jsonl").write_text("".join(lines))

  def _run(self, name, tokenizer=None, split="all", keep=None, **options):
    options = {"piece_bytes": 2000, "progress": False, **options}
    return tokenize.tokenize(
      [str(self.root / "in.jsonl")],
      tokenizer or tokenizers.BytesTokenizer(),
      self.root / name,
      {split: keep},
      **options,
    )[split]

  def _files(self, name):
    folder = self.root / name
    return {
      p.relative_to(folder): p.read_bytes()
      for p in folder.rglob("*")
      if p.is_file()
    }

  def _texts(self, name, split="all"):
    return tiny_text.texts(self.root / name / split)


class TokenizeTest(_FilesTest):
  def test_documents_come_back_in_order(self):
    content = tokenizers.train_bpe(iter(self.texts), 300)
    for tokenizer in (None, tokenizers.JsonTokenizer(content)):
      metadata = self._run(f"{tokenizer is None}", tokenizer)
      self.assertEqual(self._texts(f"{tokenizer is None}"), self.texts)
      self.assertEqual(metadata["documents"], 200)
      size = sum(len(text.encode()) for text in self.texts)
      self.assertEqual(metadata["text_bytes"], size)
      self.assertGreater(len(metadata["shards"]), 5)

  def test_documents_begin_and_end(self):
    self._run("out")
    token_set = TokenSet(self.root / "out" / "all")
    row = token_set.tokens(0, token_set.num_tokens)
    np.testing.assert_array_equal(row[token_set.ends[:-1]], 256)
    np.testing.assert_array_equal(row[token_set.ends[1:] - 1], 256)

  def test_empty_documents_are_skipped_and_listed(self):
    with (self.root / "in.jsonl").open("a") as file:
      file.write('{"text": ""}\n{"text": null}\n{"text": "last"}\n')
    metadata = self._run("out")
    self.assertEqual((metadata["documents"], metadata["skipped"]), (201, 2))
    self.assertEqual(
      (self.root / "out/all/skipped.txt").read_text(),
      "in.jsonl:201: empty\nin.jsonl:202: empty\n",
    )
    self.assertEqual(self._texts("out")[-1], "last")

  def test_special_text_stays_text(self):
    self.texts = ["a<|end_of_text|>b", "c"]
    lines = [json.dumps({"text": text}) + "\n" for text in self.texts]
    (self.root / "in.jsonl").write_text("".join(lines))
    content = tokenizers.train_bpe(iter(self.texts), 300)
    self._run("out", tokenizers.JsonTokenizer(content))
    self.assertEqual(self._texts("out"), self.texts)
    self.assertEqual(TokenSet(self.root / "out/all").metadata["documents"], 2)

  def test_processes_write_the_same_bytes(self):
    content = tokenizers.train_bpe(iter(self.texts), 300)
    tokenizer = tokenizers.JsonTokenizer(content)
    self._run("one", tokenizer)
    self._run("two", tokenizer, workers=2)
    self.assertEqual(self._files("two"), self._files("one"))

  def test_error_of_a_process_names_the_line(self):
    with (self.root / "in.jsonl").open("a") as file:
      file.write("{\n")
    with self.assertRaisesRegex(ValueError, "in.jsonl, line 201: not JSON"):
      self._run("out", workers=2)

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
    keep = tokenize.HeldOutPart(0.1, held_out=True)
    with self.assertRaisesRegex(ValueError, "keep: 'HeldOutPart.* 'all' there"):
      self._run("out", keep=keep)
    with (self.root / "in.jsonl").open("a") as file:
      file.write('{"text": "more"}\n')
    with self.assertRaisesRegex(ValueError, "inputs: 'sha256"):
      self._run("out")

  def test_number_of_processes_is_checked(self):
    with self.assertRaisesRegex(ValueError, "workers=0 must be at least 1"):
      self._run("out", workers=0)


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
  def _split(self, held_out, name="out", tokenizer=None, **options):
    return tokenize.tokenize(
      [str(self.root / options.pop("files", "in.jsonl"))],
      tokenizer or tokenizers.BytesTokenizer(),
      self.root / name,
      tokenize.held_out_parts(held_out),
      piece_bytes=2000,
      progress=False,
      **options,
    )

  def test_every_document_is_in_one_part(self):
    metadata = self._split(0.2)
    train, val = self._texts("out", "train"), self._texts("out", "val")
    self.assertCountEqual(train + val, self.texts)
    self.assertBetween(len(val), 20, 65)
    self.assertEqual(metadata["val"]["documents"], len(val))
    self.assertEqual(list(metadata), ["train", "val"])

  def test_part_of_a_document_does_not_depend_on_the_cut(self):
    self._split(0.2)
    options = {"piece_bytes": 10**6, "split": "val"}
    keep = tokenize.HeldOutPart(0.2, held_out=True)
    self._run("other", keep=keep, **options)
    self.assertEqual(self._texts("other", "val"), self._texts("out", "val"))

  def test_input_is_read_once(self):
    with mock.patch.object(
      tokenize, "read_documents", side_effect=tokenize.read_documents
    ) as read:
      metadata = self._split(0.2)
    self.assertEqual(read.call_count, len(metadata["train"]["shards"]))
    self.assertGreater(read.call_count, 5)

  def test_parts_are_those_of_two_readings(self):
    self._split(0.2, workers=2)
    for split in ("train", "val"):
      keep = tokenize.HeldOutPart(0.2, split == "val")
      self._run("alone", split=split, keep=keep)
    self.assertEqual(self._files("out"), self._files("alone"))

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

  @parameterized.parameters(("in.jsonl", 1e-9, "val"), ("*.txt", 0.9, "train"))
  def test_a_part_without_documents_leaves_nothing(self, files, share, split):
    for name in "abcde":  # of which 0.9 takes all, as 0.005 takes none
      (self.root / f"{name}.txt").write_text(name)
    word = {"train": "smaller", "val": "larger"}[split]
    with self.assertRaisesRegex(
      ValueError,
      f"{split}: .*no document for it; give a {word} --held-out than {share}"
      f".* --split={split}",
    ):
      self._split(share, files=files)
    self.assertEmpty(self._files("out"))
    self.assertLen(self._split(0.5, files=files), 2)

  def test_plain_text_without_a_part_is_told_before_the_work(self):
    for name in "abcde":
      (self.root / f"{name}.txt").write_text(name)
    with (
      mock.patch.object(tokenize, "read_documents") as read,
      self.assertRaisesRegex(ValueError, "val: .*--held-out than 0.005"),
    ):
      self._split(0.005, files="*.txt")
    read.assert_not_called()
    self.assertFalse((self.root / "out").exists())

  def test_options_that_wrote_nothing_do_not_stick(self):
    with self.assertRaisesRegex(ValueError, "line 1: no field 'body'"):
      self._split(0.2, field="body")
    self._split(0.2)
    with self.assertRaisesRegex(ValueError, "keep: 'HeldOutPart"):
      self._split(0.3)
    self.assertLen(
      self._texts("out", "val"), self._split(0.2)["val"]["documents"]
    )

  def test_share_is_checked(self):
    for share in (0, 1, -0.1):
      with self.assertRaisesRegex(ValueError, f"held_out={share} must be"):
        self._split(share)

  def test_share_is_met_on_average(self):
    part = tokenize.HeldOutPart(0.05, held_out=True)
    rest = tokenize.HeldOutPart(0.05, held_out=False)
    names = [f"a.jsonl:{i}" for i in range(20_000)]
    chosen = list(map(part, names))
    self.assertBetween(sum(chosen), 900, 1100)
    self.assertEqual([not c for c in chosen], list(map(rest, names)))


if __name__ == "__main__":
  absltest.main()
