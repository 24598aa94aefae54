"""Files: text for terminals and spreadsheets, writers, what is temporary."""

import csv
import os
import subprocess
import sys

from moh_jax.runtime import files
from tests.folders import FolderTest


class TextTest(FolderTest):
  def test_control_characters_are_written_as_text(self):
    for text, expected in (
      ("a\tb\nc é \udcff", "a\tb\nc é \udcff"),
      ("\033[2J\x07\r\x9b", "\\x1b[2J\\x07\\x0d\\x9b"),
      ("\033[32mgreen\033[0m", "\\x1b[32mgreen\\x1b[0m"),
      ("a\uffff", "a\\uffff"),
      ("a\u2028b\u202egpj.c\u2066\u200f", "a\\u2028b\\u202egpj.c\\u2066\u200f"),
    ):
      self.assertEqual(files.printable(text), expected)
    self.assertEqual(files.printable("a\nb", kept=""), "a\\x0ab")

  def test_formulas_are_text_to_spreadsheets(self):
    names = ["=1+1", "+x", "-x", "@x", "\tx", "\n=1", "\uff1d1", "'=1+1"]
    names += ["-0.5", "+2", "ant", "", "a=b"]
    files.write_csv(self.root / "a.csv", names, [[-1, None, *names[2:]]])
    with (self.root / "a.csv").open(newline="") as file:
      header, row = csv.reader(file)
    quoted = [f"'{name}" for name in names[:8]]
    self.assertEqual(header, [*quoted, *names[8:]])
    self.assertEqual(row, ["-1", "", *header[2:]])


class OnlyWriterTest(FolderTest):
  def test_a_file_or_folder_has_one_writer(self):
    (self.root / "file").touch()
    for path in (self.root, self.root / "file"):
      for _ in range(2):
        with files.only_writer(path):
          with self.assertRaisesRegex(OSError, f"{path}: another process is"):
            with files.only_writer(path):
              pass


class WriteTest(FolderTest):
  def test_standard_output_is_written_in_order(self):
    code = (
      "from moh_jax.runtime import files; print('a'); "
      "files.write_whole('/dev/stdout', b'b\\n'); print('c')"
    )
    with (self.root / "out").open("w") as out:
      subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    self.assertEqual((self.root / "out").read_text(), "a\nb\nc\n")


class TemporaryTest(FolderTest):
  def test_what_killed_processes_left_goes(self):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = files.temporary_beside(self.root / "a.json").name
    left = own.replace(f"-{os.getpid():x}-", f"-{ended.pid:x}-")
    other = left.replace("json.", "json.x")  # of another machine
    folder = self.root / "in"
    folder.mkdir()
    gone = [left, left.replace("a.json", "a\nb")]
    for name in (own, *gone, other, ".b.0123456789ab.tmp", f"c{left}"):
      (folder / name).touch()
    (folder / f".d{left}").mkdir()
    files.write_whole(folder / "z", b"")
    kept = {own, other, ".b.0123456789ab.tmp", f"c{left}", "z"}
    self.assertEqual({file.name for file in folder.iterdir()}, kept)
