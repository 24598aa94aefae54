import pathlib
import tempfile

from absl.testing import absltest

from moh_jax.data.tokenizers import load_tokenizer
from tests.cli import tiny_checkpoint


class TrainTokenizerCommandTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "tokenizer.json"
    text = "".join(f"head {i} of layer {i * i}\n" for i in range(500))
    (self.root / "a.txt").write_text(text)

  def _call(self, *argv, pattern="*.txt"):
    return tiny_checkpoint.call(
      "prepare", "train-tokenizer", "--data", self.root / pattern, *argv
    )

  def test_writes_a_tokenizer_of_the_size(self):
    status, out, _ = self._call("--vocab-size=400", "--out", self.out)
    self.assertEqual((status, out), (0, f"{self.out}: 400 entries\n"))
    tokenizer = load_tokenizer(self.out)
    self.assertEqual(tokenizer.vocab_size, 400)
    self.assertLess(len(tokenizer.encode("head 1 of layer 1")), 9)

  def test_text_that_is_too_short_is_told(self):
    status, out, _ = self._call("--vocab-size=99999", "--out", self.out)
    self.assertEqual(status, 0)
    self.assertIn("--vocab-size=99999 is not reached", out)

  def test_broken_lines_are_skipped_on_request(self):
    lines = ['{"text": "head of a layer"}', "{"] * 50
    (self.root / "bad.jsonl").write_text("\n".join(lines))
    argv = ("--vocab-size=265", "--out", self.out, "--on-error=skip")
    status, out, err = self._call(*argv, pattern="bad.jsonl")
    self.assertEqual(
      (status, out),
      (0, f"{self.out}: 265 entries; 50 skipped (50 not JSON)\n"),
      err,
    )

  def test_errors_are_one_line_and_leave_no_file(self):
    (self.root / "bad.jsonl").write_text("{}\n")
    for out, size, pattern, message in (
      (self.out, 100, "*.txt", "vocab_size=100 must be at least 258"),
      (self.out, 400, "bad.jsonl", "bad.jsonl, line 1: no field 'text'"),
      (self.root / "a.model", 400, "*.txt", "must end in .json"),
      (self.root / "no/a.json", 400, "*.txt", "no directory"),
    ):
      status, _, err = self._call(
        "--vocab-size", size, "--out", out, pattern=pattern
      )
      self.assertEqual(status, 2)
      self.assertIn(message, err.splitlines()[-1])
      self.assertFalse(out.exists())


if __name__ == "__main__":
  absltest.main()
