"""The entry point: help, wrong use, errors in one line, warnings, start."""

import contextlib
import io
import logging
import sys
from unittest import mock

from absl.testing import parameterized

import moh_jax
from moh_jax.cli import classify, main
from moh_jax.config import public_formats
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import call, done
from tests.two_processes import python

COMMANDS = [
  (name, *kind.split()) for name in main.COMMANDS for kind in main.kinds(name)
]
_DIGITS = "--config=configs/vit_digits.py"


class HelpTest(parameterized.TestCase):
  def test_lists_name_commands_kinds_and_formats(self):
    lists = {"": main.COMMANDS}
    lists |= {name: main.kinds(name) for name in ("bench", "prepare")}
    for command, names in lists.items():
      out = done(*command.split(), "--help")
      for name in names:
        self.assertRegex(out, rf"\n  {name} +[A-Z].*\.\n")
    out = done("convert", "--help")
    for name in public_formats():
      self.assertRegex(out, rf"[\s]{name}[,;.\s]")

  def test_keys_of_a_config_are_shown_a_section_at_a_time(self):
    out = done("train", "--help", _DIGITS)
    self.assertRegex(out, r"\n  optim +The optimizer")
    self.assertIn("--workdir", done("train", "--help", "optim"))
    out = done("train", "--help", "optim", _DIGITS, "--config.optim.lr=0.25")
    self.assertStartsWith(out, "optim: ")
    self.assertIn("--config.optim.lr=0.25  (float)", out)
    self.assertNotIn("--config.data", out)
    tuning = "--config=configs/llm_tune.py:lora"  # its model is a checkpoint's
    self.assertIn(
      "lora.rank=16  (int)", done("train", "--help", "tune", tuning)
    )


class MainTest(tiny_checkpoint.CommandTest):
  @parameterized.parameters(
    ("", "required: COMMAND"),
    ("paint", "invalid choice: 'paint' (choose from 'classify'"),
    ("evalute", "); did you mean 'evaluate'?; see"),
    ("prepare tokenise", "did you mean 'tokenize'?; see python -m moh_jax pre"),
    ("train --workdir x", "--config"),
    ("convert --from onnx --source x --out y", "--from='on"),
    ("heads --checkpoint x --top-k 8,,9", "--top-k[1]='' must be of type int"),
    ("heads --checkpoint x --batches 0", "--batches=0 must be at least 1"),
    ("heads --checkpoint x --out=", "--out='' must be the name of a file or"),
    ("inspect --check x", "unrecognized arguments: --check"),  # not shortened
    ("inspect runs/x", "runs/x, did you mean --checkpoint runs/x?"),
    ("inspect --config.a.b=1", "--config.a.b=1 needs --config FILE[:ARG]"),
  )
  def test_wrong_use_is_one_line_that_says_where_help_is(self, argv, message):
    said = self.assert_refused(message, *argv.split())
    self.assertRegex(said, "; see python -m moh_jax .*--help\n$")

  def test_tells_its_version(self):
    self.assertEqual(done("--version"), f"moh_jax {moh_jax.__version__}\n")

  def test_a_module_that_cannot_be_imported_is_named(self):
    (self.root / "failing.py").write_text("1 / 0")
    with mock.patch.object(sys, "path", [str(self.root), *sys.path]):
      for name in ("no_such_module", "../x", "failing"):
        argv = ("--import", name, "inspect")
        self.assert_refused(f"--import '{name}': ", *argv)

  def test_the_command_comes_after_the_module(self):
    file = self.root / "mine.py"
    file.write_text("from unittest import mock\nit = mock.sentinel.it")
    with mock.patch.object(sys, "path", [str(self.root), *sys.path]):
      for module in ("mine", file):
        out = self.done("--import", module, "inspect", _DIGITS)
        self.assertIn("358,570", out)
    self.assertIs(sys.modules.pop("mine").it, mock.sentinel.it)

  def test_a_file_can_be_imported_by_its_path(self):
    file = self.root / "lies_elsewhere.py"
    file.write_text("raise KeyError('it ran')")
    with mock.patch.object(sys, "path", list(sys.path)):
      self.assert_refused("KeyError: 'it ran'", "--import", str(file), "train")

  def test_traceback_is_shown_on_request(self):
    argv = ("inspect", "--checkpoint", "/nope/nowhere")
    self.assert_refused("nowhere holds no checkpoint", *argv)
    said = self.call(*argv, "--traceback")[2]
    self.assertIn("Traceback (most recent call last)", said)

  def test_names_that_the_terminal_cannot_show_end_no_command(self):
    run, names = self.root / "run", ("\u0436\u0443\u043a", *"abcde")
    tiny_checkpoint.save_random(run, tiny_checkpoint.CONFIG, names)
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(out):
      self.assertEqual(main.main(["inspect", "--checkpoint", str(run)]), 0)
      out.flush()
    self.assertIn(rb"\u0436", out.buffer.getvalue())

  def test_warnings_are_their_text_alone(self):
    def run(options):
      del options
      logging.getLogger("moh_jax.data").warning("an odd file")
      return 0

    logging.basicConfig()  # as a library may call it
    ours = logging.getLogger("moh_jax")
    self.enterContext(mock.patch.object(ours, "handlers", []))
    stored = tiny_checkpoint.stored("vit")
    with mock.patch.object(classify, "run", run):
      result = call("classify", stored, "--checkpoint", stored)
    self.assertEqual(result, (0, "", "an odd file\n"))


_LIGHT = """
import contextlib, io, sys
from moh_jax.cli import main
for argv in {calls}:
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    with contextlib.suppress(SystemExit):
      main.main(argv)
  loaded = [name for name in ("jax", "flax", "orbax") if name in sys.modules]
  print(" ".join(argv), "->", len(out.getvalue().splitlines()), *loaded)
"""


_EARLY = f"""
paint
train
heads --checkpoint=/nope
heads --checkpoint=/nope --out=
inspect {_DIGITS} --json=README.md/x
inspect --config=configs/nope.py
inspect {_DIGITS}:huge
train {_DIGITS} --workdir=x --config.optim.nope=1
train {_DIGITS} --workdir=x --config.optim.lr=-1
"""


class ProcessTest(parameterized.TestCase):
  def test_a_device_that_is_not_here_is_one_line(self):
    argv = "-m", "moh_jax", "evaluate", "--checkpoint"
    stored = str(tiny_checkpoint.stored("vit"))
    status, _, err = python(*argv, stored, JAX_PLATFORMS="cuda")
    said = "error: JAX_PLATFORMS='cuda': JAX finds no such device\n"
    self.assertEqual((status, err), (2, said))

  @parameterized.parameters(
    (r"\d{2,}", ["", "bench", f"train {_DIGITS}", *map(" ".join, COMMANDS)]),
    ("1", _EARLY.strip().splitlines()),
  )
  def test_jax_is_not_imported_for_help_and_early_errors(self, lines, calls):
    calls = [call.split() for call in calls]
    if lines != "1":
      calls = [[*call, "--help"] for call in calls]
    status, out, err = python("-c", _LIGHT.format(calls=calls))
    self.assertEqual((status, err), (0, ""))
    rows = out.splitlines()
    self.assertLen(rows, len(calls))
    for row in rows:
      self.assertRegex(row, rf"-> {lines}$")

  def test_script_is_the_command(self):
    argv = "--workdir=/nope/run", _DIGITS, "--config.model.nope=1"
    status, out, err = python("train.py", *argv)
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, "^error: unknown config key model.nope; .*\n$")

  def test_warnings_of_libraries_do_not_reach_the_terminal(self):
    folder = self.create_tempdir()
    folder.create_file(
      "odd.py",
      "import warnings\n"
      "for kind in (DeprecationWarning, FutureWarning, UserWarning):\n"
      "  warnings.warn('old', kind, stacklevel=1)\n",
    )
    program = "-m", "moh_jax", "--import", "odd", "inspect"
    where = {"PYTHONPATH": folder.full_path, "PYTHONWARNINGS": ""}
    for flags, shown in ([], 0), (["-W", "default"], 3):
      _, _, err = python(*flags, *program, **where)
      self.assertEqual(err.count("old"), 2 * shown, err)

  def test_missing_library_says_what_to_install(self):
    program = (
      "import runpy, sys; sys.modules['msgspec'] = None; "
      "runpy.run_module('moh_jax', run_name='__main__')"
    )
    status, _, err = python("-c", program)
    self.assertEqual(status, 2)
    self.assertRegex(
      err, r"^error: .*msgspec.*pip install '.\[train\]' in the clone\n$"
    )


class ReportErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (ValueError("field=1\n  must be  2"), "field=1 must be 2"),
    (OSError("no space"), "no space"),
    (RuntimeError("RESOURCE_EXHAUSTED: 9 bytes."), "R.*data.batch_size.*"),
    # Of a disk, not of a device's memory.
    (ValueError("RESOURCE_EXHAUSTED: No space left"), "R.* No space left"),
    (RuntimeError("Unknown backend: 'gpu' requested"), "Unknown .*"),
    (ImportError("Please install gcsfs"), "Please install gcsfs"),
  )
  def test_users_mistakes_become_one_line(self, error, said):
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(main.report_errors(mock.Mock(side_effect=error), 0), 2)
    self.assertRegex(err.getvalue(), f"^error: {said}\n$")

  def test_our_own_mistakes_are_not_hidden(self):
    ours = ModuleNotFoundError("No module named 'x'", name="moh_jax.x")
    for error in (KeyError("bug"), ours):
      with self.assertRaises(type(error)):
        main.report_errors(mock.Mock(side_effect=error), False)
