import json
import pathlib
import tempfile

from absl.testing import absltest

from moh_jax.data.token_sets import TokenSet
from tests.cli import tiny_checkpoint


class TokenizeCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "out"
    for name in ("a", "b"):
      lines = [json.dumps({"body": f"{name} {i}"}) for i in range(50)]
      (self.root / f"{name}.jsonl").write_text("\n".join(lines))

  def _call(self, *argv, pattern="*.jsonl"):
    return tiny_checkpoint.call(
      *("prepare", "tokenize"),
      "--data",
      self.root / pattern,
      "--out",
      self.out,
      "--tokenizer=bytes",
      "--field=body",
      "--workers=1",
      *argv,
    )

  def test_documents_are_held_out(self):
    status, out, _ = self._call("--held-out", 0.2)
    self.assertEqual(status, 0)
    train, val = (TokenSet(self.out / s).metadata for s in ("train", "val"))
    self.assertEqual(train["documents"] + val["documents"], 100)
    self.assertEqual(
      out.splitlines()[0],
      f"train: {train['documents']} documents, {train['tokens']:,} tokens of "
      f"{train['text_bytes']:,} bytes of text in {self.out}/train",
    )
    self.assertTrue(out.splitlines()[1].startswith("val: "))
    self.assertEqual(self._call("--held-out", 0.2)[0], 0)

  def test_one_split_takes_all(self):
    (self.root / "c.jsonl").write_text('{"body": ""}\n')
    status, out, _ = self._call("--split=val", "--shard-bytes=200")
    self.assertEqual(status, 0)
    self.assertEqual([p.name for p in self.out.iterdir()], ["val"])
    metadata = TokenSet(self.out / "val").metadata
    self.assertEqual(metadata["documents"], 100)
    self.assertGreater(len(metadata["shards"]), 3)
    self.assertIn(f"; 1 skipped (1 empty), see {self.out}/val/skipped\n", out)

  def test_errors_are_one_line(self):
    (self.root / "bad.jsonl").write_text('{"body": 1}\n')
    for argv, pattern, message in (
      ((), "*.jsonl", "bad.jsonl, line 1: 'body' is int"),
      ((), "*.csv", "*.csv: no such file"),
      (("--tokenizer=no.json",), "a.jsonl", "no.json: no such tokenizer"),
      (("--held-out=2",), "a.jsonl", "--held-out=2.0 must be in [0, 1]"),
    ):
      status, _, err = self._call(*argv, pattern=pattern)
      self.assertEqual(status, 2)
      self.assertIn(message, err.splitlines()[-1])

  def test_few_files_fill_both_parts(self):
    for name in "abcde":
      (self.root / f"{name}.txt").write_text(name)
    status, out, err = self._call(pattern="*.txt")
    self.assertEqual((status, err), (0, ""))
    train, val = out.splitlines()
    self.assertStartsWith(train, "train: 4 documents")
    self.assertStartsWith(val, "val: 1 documents")

  def test_one_file_is_not_divided(self):
    (self.root / "one.txt").write_text("text")
    for share in (0.2, 0.99):
      status, out, err = self._call(f"--held-out={share}", pattern="one.txt")
      self.assertEqual((status, out), (2, ""))
      self.assertIn("1 document, and documents are not cut", err)

  def test_broken_lines_are_skipped_on_request(self):
    (self.root / "bad.jsonl").write_text('{"body": 1}\n{\n{"body": "b"}\n{\n')
    argv = ("--split=train", "--on-error=skip")
    status, out, err = self._call(*argv)
    self.assertEqual((status, err), (0, ""))
    self.assertIn("train: 101 documents", out)
    self.assertIn(
      "; 3 skipped (2 not JSON, 1 'body' is int, expected text), see "
      f"{self.out}/train/skipped\n",
      out,
    )

  def test_held_out_and_split_exclude_each_other(self):
    status, _, err = self._call("--held-out=0.1", "--split=val")
    self.assertEqual(status, 2)
    self.assertIn("must not be given with --held-out", err)


if __name__ == "__main__":
  absltest.main()
