import contextlib
import io
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.cli import classify, main
from moh_jax.config import public_formats
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.training import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]


_EVERY = [
  (name, *kind.split()) for name in main.COMMANDS for kind in main.kinds(name)
]


class MainTest(parameterized.TestCase):
  @parameterized.parameters(*_EVERY)
  def test_every_command_has_help(self, *command):
    status, out, _ = tiny_checkpoint.call(*command, "--help")
    self.assertEqual(status, 0)
    self.assertIn(f"python -m moh_jax {' '.join(command)} [-h]", out)
    self.assertIn("--traceback", out)

  @parameterized.parameters("bench", "prepare")
  def test_help_lists_the_kinds_of_a_command(self, command):
    status, out, _ = tiny_checkpoint.call(command, "--help")
    self.assertEqual(status, 0)
    for kind in main.kinds(command):
      self.assertRegex(out, rf"\n  {kind} +[A-Z]")

  def test_help_names_every_public_format(self):
    _, out, _ = tiny_checkpoint.call("convert", "--help")
    for name in public_formats():
      self.assertRegex(out, rf"[\s]{name}[,;.\s]")

  def test_help_lists_the_commands(self):
    status, out, _ = tiny_checkpoint.call("--help")
    self.assertEqual(status, 0)
    for name in main.COMMANDS:
      self.assertRegex(out, rf"\n  {name} +[A-Z].*\.\n")

  @parameterized.parameters(
    ((), "COMMAND"),
    (("paint",), "invalid choice: 'paint' (choose from 'bench'"),
    (("classify", "--checkpoint", "x"), "IMAGES"),
    (("inspect", "--check", "x"), "unrecognized arguments: --check"),
    (("train", "--config", "x"), "--workdir"),
    (("train", "--workdir", "x"), "--config"),
    (("heads", "--checkpoint", "x", "--top-k", "one"), "--top-k[0]='one' must"),
    (("heads", "--checkpoint", "x", "--step", "-1"), "--step='-1' must be"),
    (("heads", "--checkpoint", "", "--top-k", "1"), "--checkpoint='' must be"),
    (("heads", "--checkpoint", "x", "--data", ""), "--data[0]='' must be"),
    (("bench", "attention", "--config.train.steps=3"), "needs --config FILE"),
    (("sample", "--checkpoint", "x"), "--out"),
    (
      ("heads", "--checkpoint", "x", "--config.optim.lr=1"),
      "--config.optim.lr=1 has no effect on a trained model",
    ),
    (("inspect", "--config", "x", "b.csv"), "arguments: b.csv; see"),
    (
      ("convert", "--from", "onnx", "--source", "x", "--out", "y"),
      "--from='on",
    ),
  )
  def test_wrong_use_is_one_line_that_says_where_help_is(self, argv, message):
    status, out, err = tiny_checkpoint.call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertStartsWith(err, "error: ")
    self.assertIn(message, err)
    self.assertIn("; see python -m moh_jax ", err)
    self.assertEndsWith(err, " --help\n")

  @parameterized.parameters(True, False)
  def test_import_stands_before_or_after_the_command(self, before):
    option, command = ["--import", "no_such_module"], ["inspect"]
    argv = option + command if before else command + option
    status, _, err = tiny_checkpoint.call(*argv)
    self.assertEqual(status, 2)
    self.assertStartsWith(err, "error: --import no_such_module: No module")

  def test_traceback_is_shown_on_request(self):
    argv = ("inspect", "--checkpoint", "/nope/nowhere")
    _, _, short = tiny_checkpoint.call(*argv)
    status, _, long = tiny_checkpoint.call(*argv, "--traceback")
    self.assertEqual(status, 2)
    self.assertNotIn("Traceback", short)
    self.assertIn("Traceback (most recent call last)", long)
    self.assertIn("FileNotFoundError", long)


_LIGHT = """
import contextlib, io, sys
from moh_jax.cli import main
for argv in {calls}:
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    try:
      main.main(argv)
    except SystemExit:
      pass
  loaded = [name for name in ("jax", "flax", "orbax") if name in sys.modules]
  print(" ".join(argv), "->", len(out.getvalue().splitlines()), *loaded)
"""


class WithoutJaxTest(absltest.TestCase):
  """JAX takes seconds to import; a mistake should not."""

  def _check(self, calls, lines):
    done = subprocess.run(
      [sys.executable, "-c", _LIGHT.format(calls=calls)],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(done.stderr, "")
    rows = done.stdout.splitlines()
    self.assertLen(rows, len(calls))
    for row in rows:
      self.assertRegex(row, rf"-> {lines}$")

  def test_help_does_not_import_it(self):
    config = "--config=configs/vit_digits.py"
    calls = [[*command, "--help"] for command in _EVERY]
    calls += [["bench", "--help"], ["train", config, "--help"]]
    self._check([["--help"], *calls], r"\d{2,}")

  def test_early_errors_do_not_import_it(self):
    run = ["train", "--config=configs/vit_digits.py", "--workdir=x"]
    calls = [
      ["paint"],
      ["train"],
      ["heads", "--checkpoint=x", "--nope"],
      ["heads", "--checkpoint=/nope"],
      ["heads", "--checkpoint=/nope", "--out="],
      ["inspect", "--config=configs/vit_digits.py", "--json=/proc/x"],
      ["inspect", "--config=configs/nope.py"],
      ["inspect", "--config=configs/vit_digits.py:huge"],
      ["train", "--config=README.md", "--workdir=x"],
      [*run, "--config.optim.nope=1"],
      [*run, "--config.optim.lr=-1"],
      [*run, "--config.optim.lr"],
    ]
    self._check(calls, "1")


class TerminalTest(absltest.TestCase):
  def test_names_that_it_cannot_show_end_no_command(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    config = tiny_checkpoint.CONFIG
    names = ("\u0436\u0443\u043a", "\udcff", "\U0001f41d", *"abc")
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(root / "run", tiny.random_params(config), metadata)
    Image.new("RGB", (8, 8)).save(root / "\u0436.png")
    argv = ("--checkpoint", str(root / "run"), "--json", str(root / "x.json"))
    for command in (["inspect"], ["classify", str(root / "\u0436.png")]):
      for encoding in ("ascii", "latin-1", "utf-8"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        with contextlib.redirect_stdout(out):
          self.assertEqual(main.main([*command, *argv]), 0)
          out.flush()
        self.assertIn(b"udcff", out.buffer.getvalue())
        self.assertIn("\\udcff", (root / "x.json").read_text())


class WarningsTest(absltest.TestCase):
  def test_warnings_are_their_text_alone(self):
    def run(options):
      del options
      logging.getLogger("moh_jax.data").warning("an odd file")
      return 0

    logging.basicConfig()  # as a library may call it
    ours = logging.getLogger("moh_jax")
    before = ours.handlers[:], ours.propagate
    with mock.patch.object(classify, "run", run):
      folder = self.enterContext(tempfile.TemporaryDirectory())
      tiny_checkpoint.save(folder)
      status, _, err = tiny_checkpoint.call(
        "classify", folder, "--checkpoint", folder
      )
    self.assertEqual((status, err), (0, "an odd file\n"))
    self.assertEqual((ours.handlers, ours.propagate), before)


class ReportErrorsTest(parameterized.TestCase):
  def _report(self, error):
    def fail():
      raise error

    with contextlib.redirect_stderr(io.StringIO()) as err:
      return main.report_errors(fail, False), err.getvalue()

  @parameterized.parameters(
    (ValueError("field=1\n  must be  2"), "field=1 must be 2"),
    (OSError("no space"), "no space"),
    (NotImplementedError(), "NotImplementedError"),
  )
  def test_users_mistakes_become_one_line(self, error, said):
    self.assertEqual(self._report(error), (2, f"error: {said}\n"))

  def test_full_memory_says_what_needs_less(self):
    status, err = self._report(RuntimeError("RESOURCE_EXHAUSTED: 9 bytes."))
    self.assertEqual(status, 2)
    self.assertRegex(err, "^error: RESOURCE_EXHAUSTED.*data.batch_size.*\n$")

  def test_our_own_mistakes_are_not_hidden(self):
    ours = ModuleNotFoundError("No module named 'x'", name="moh_jax.x")
    for error in (KeyError("bug"), ours):
      with self.assertRaises(type(error)):
        self._report(error)

  def test_missing_library_says_what_to_install(self):
    error = ModuleNotFoundError("No module named 'grain'", name="grain")
    status, err = self._report(error)
    message = "error: No module named 'grain'; pip install 'moh_jax[train]'\n"
    self.assertEqual((status, err), (2, message))
    program = (
      "import runpy, sys; sys.modules['msgspec'] = None; "
      "runpy.run_module('moh_jax', run_name='__main__')"
    )
    done = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, text=True
    )
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, "^error: .*msgspec.*moh_jax.train.'\n$")


class ModuleTest(absltest.TestCase):
  def test_warnings_of_libraries_do_not_reach_the_terminal(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    pathlib.Path(folder, "odd.py").write_text(
      "import warnings\n"
      "for kind in (DeprecationWarning, FutureWarning, UserWarning):\n"
      "  warnings.warn('old', kind, stacklevel=1)\n"
    )
    environment = os.environ | {"PYTHONPATH": folder}
    environment.pop("PYTHONWARNINGS", None)
    for flags, shown in ([], 0), (["-W", "default"], 3):
      done = subprocess.run(
        [sys.executable, *flags, "-m", "moh_jax", "--import", "odd", "inspect"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        env=environment,
      )
      self.assertEqual(done.stderr.count("old"), 2 * shown, done.stderr)


if __name__ == "__main__":
  absltest.main()
