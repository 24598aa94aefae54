"""Options that are made from the fields of dataclasses."""

import argparse
import contextlib
import dataclasses
import io
from typing import ClassVar

from absl.testing import absltest, parameterized

from moh_jax.cli import fields
from moh_jax.cli.arguments import COMMANDS, images
from moh_jax.cli.head_options import HeadOptions
from moh_jax.config import SampleConfig
from moh_jax.config.llm import Sampling


@dataclasses.dataclass(frozen=True)
class _Base:
  """A base.

  Attributes:
    size: rows, 100% of
      them.
  """

  size: int = 3


@dataclasses.dataclass(frozen=True)
class _Options(_Base):
  """Options.

  Attributes:
    share: of the whole; None is all.
    names: of what is run.
    kind: how.
    quick: whether to hurry.
  """

  share: float | None = None
  names: tuple[str, ...] = ("a", "b")
  kind: str = "x"
  quick: bool = False

  CHOICES: ClassVar = {"kind": ("x", "y"), "names": ("a", "b", "c")}


def _parse(command, *argv):
  parser = argparse.ArgumentParser()
  COMMANDS[command](parser)
  return parser.parse_args(argv)


class AddFieldsTest(parameterized.TestCase):
  def _parser(self, *names, **options):
    parser = argparse.ArgumentParser()
    fields.add_fields(parser, _Options, *names, **options)
    return parser

  def test_what_is_given_has_the_type_of_its_field(self):
    argv = "--size 4 --share 0.5 --names c,a --kind y --quick".split()
    given = fields.given_fields(self._parser().parse_args(argv), _Options)
    wanted = _Options(4, 0.5, ("c", "a"), "y", True)
    self.assertEqual(given, dataclasses.asdict(wanted))

  def test_what_is_not_given_is_left_to_the_class(self):
    args = self._parser().parse_args(["--size", "4"])
    self.assertEqual(fields.given_fields(args, _Options), {"size": 4})
    self.assertEqual(fields.given_fields(args, _Options, "kind"), {})

  def test_help_is_that_of_the_docstring(self):
    text = " ".join(self._parser().format_help().split())
    self.assertIn("--size SIZE rows, 100% of them (default: 3)", text)
    self.assertIn("--share SHARE of the whole (default: all) --", text)
    self.assertIn("of what is run; of a, b, c (default: a,b)", text)
    self.assertIn("--kind {x,y} how (default: x)", text)

  def test_help_says_where_the_defaults_are(self):
    text = self._parser("kind", defaults="the run's").format_help()
    self.assertIn("how (default: the run's)", text)
    self.assertNotIn("--size", text)

  @parameterized.parameters("--size x", "--kind z")
  def test_wrong_values_are_wrong_use(self, argv):
    with contextlib.redirect_stderr(io.StringIO()):
      with self.assertRaises(SystemExit):
        self._parser().parse_args(argv.split())


class CommandsTest(absltest.TestCase):
  def test_defaults_are_left_to_the_classes(self):
    args = _parse("bench", "attention", "--heads", "8")
    given = fields.given_fields(args, HeadOptions)
    self.assertEqual(given, {"heads": 8})
    args = _parse("generate", *"--checkpoint x --prompt x --seed 2".split())
    self.assertEqual(
      fields.given_fields(args, Sampling, "seed", "top_p"), {"seed": 2}
    )
    args = _parse("sample", *"--checkpoint x --out x --steps 5".split())
    section = fields.given_fields(args, SampleConfig, *images.OVERRIDES)
    self.assertEqual(section, {"steps": "5"})


if __name__ == "__main__":
  absltest.main()
