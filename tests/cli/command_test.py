"""Options of commands: their flags, types, help and checks before JAX."""

import contextlib
import dataclasses
import io
import json
from typing import Literal
from unittest import mock

import numpy as np
from absl.testing import parameterized

from moh_jax.cli import command, flags
from moh_jax.config.base import Count, Decay
from tests import folders


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(command.Output):
  """Say something.

  More of it.

  Attributes:
    files: to read, 100% of
      them.
    kind: how.
    sizes: of the parts.
    several: of groups.
    words: texts.
    share: of the whole.
    from_: where it begins.
    out: to write.
    quick: hurry.
    seed: of the draws.
  """

  files: tuple[command.Place, ...] = command.option("positional")
  kind: Literal["x", "y"] = "x"
  sizes: tuple[Count, ...] = (1, 2)
  several: tuple[tuple[Count, ...], ...] = command.option(
    "repeated", default=()
  )
  words: tuple[str, ...] = command.option("listed", default=())
  share: Decay | None = None
  from_: str
  out: command.OutPath | None = None
  quick: bool = False
  seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Served(command.Checkpoint, command.Distributed, command.Output):
  """Serve a model."""


def _parse(*argv, cls=_Options):
  """The options, or what is said of them."""
  parser = flags.make_parser("command", cls)
  with contextlib.redirect_stderr(io.StringIO()) as err:
    try:
      return flags.parse(parser, cls, argv)
    except SystemExit as stop:
      assert stop.code == 2
      return err.getvalue()


class ParseTest(parameterized.TestCase):
  def test_values_have_the_types_of_their_fields(self):
    given = _parse(
      *("a", "b", "--from", "7", "--kind", "y", "--sizes", "3, 4", "--quick"),
      *("--several", "1,2", "--several", "3", "--words", "1,2", "none"),
      *("--share", "0.5", "--out", "none", "--json=-"),
    )
    wanted = _Options(
      files=("a", "b"), from_="7", kind="y", sizes=(3, 4), quick=True,
      several=((1, 2), (3,)), words=("1,2", "none"), share=0.5, out="none",
      json="-",
    )  # fmt: skip
    self.assertEqual(given, wanted)
    self.assertEqual(_parse("a", "--from="), _Options(files=("a",), from_=""))
    self.assertIn("did you mean '--quick'?", _parse("a", "--from=b", "--quik"))

  def test_help_is_that_of_the_docstring(self):
    text = flags.make_parser("command", _Options, command.SHARED).format_help()
    text = " ".join(text.split())
    places = [
      text.index(part)
      for part in (
        "Say something. More of it. positional arguments:",
        "FILES to read, 100% of them",
        "--from NAME where",
        "--kind {x,y} how (default: x)",
        "--sizes N,... of the parts (default: 1,2)",
        "--share X of the whole --",
        "--seed N of the draws (default: 0)",
        "options that commands share:",
        "--json PATH w",
      )
    ]
    self.assertEqual(places, sorted(places))

  def test_changes_are_taken_out_in_order(self):
    given = _parse(
      *("--config=x.py", "--config.a.b=1", "--config.a.b=-2"),
      *("--config.data.path=a=b", "--traceback"),
      cls=command.RunConfig,
    )
    self.assertEqual((given.config, given.traceback), ("x.py", True))
    self.assertEqual(given.changes, ("a.b=1", "a.b=-2", "data.path=a=b"))
    said = _parse("--config=x.py", "--config.optim.lr", cls=command.RunConfig)
    self.assertIn("is changed by --config.KEY=VALUE", said)


class ProcessesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"json": "b"}, True),
    ({"top_k": (1,)}, False),
    ({"changes": ("model.dtype=bfloat16",)}, False),
    ({}, False),  # of a newer checkpoint
  )
  def test_processes_of_a_run_have_the_same_options(self, changes, same):
    given = {"checkpoint": "run", "json": "a", "top_k": (2,)}
    newest = iter([[100], [100] if changes else [200]])
    with mock.patch.object(command.steps, "list_steps", lambda _: next(newest)):
      told = [_Served(**x).compared() for x in (given, {**given, **changes})]
    self.assertEqual(told[0] == told[1], same)


class GiveTest(folders.FolderTest):
  def _give(self, values, options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
      options.give(values, ("a line", "another"))
    return out.getvalue()

  def test_lines_are_for_people_and_json_for_programs(self):
    value, path = {"a": [1, 2], "b": {"c": np.nan}}, self.root / "new/x.json"
    told = '{"a": [1, 2], "b": {"c": null}}\n'
    for to, out in (
      (None, "a line\nanother\n"),
      (str(path), "a line\nanother\n"),
      ("-", told),
    ):
      self.assertEqual(self._give(value, command.Output(json=to)), out)
    self.assertEqual(json.loads(path.read_text()), json.loads(told))

  def test_only_the_first_process_writes(self):
    given = _Served(checkpoint="x", distributed=True, json="-")
    with mock.patch("jax.process_index", lambda: 1):
      self.assertEmpty(self._give({"a": 1}, given))

  def test_columns_are_aligned(self):
    text = command.table([("a", 100), ("long", 2)], ("name", "n"))
    self.assertEqual(text, "name  n\na     100\nlong  2")
