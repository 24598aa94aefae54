"""Leaves of configs: every one is checked, whatever stands there."""

import dataclasses

from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from moh_jax import config as config_lib
from moh_jax.config import parse
from moh_jax.config.run import section_types
from moh_jax.runtime.steps import load_config
from tests.fuzz import hostile

_FAMILIES = ("vit", "dit", "llm")
_TEXTS = (
  *("inf", "nan", "1e30", "(1,", "((((", "-" * 3000, "1,2", "", "None", "[]"),
  *("9" * 5000, "{}", "lambda: 0", "\\x00", "1j", "b'x'", "...", "()"),
)
_EXTREMES = (float("inf"), float("nan"), 1e30, 10**30, -1e30)


def _sections(family):
  config = config_lib.Config(section_types(family)["model"]())
  return config_lib.to_dict(config)


def _numbers(values):
  """Sections and names of the leaves that are numbers, or tuples of numbers."""
  for name, value in values.items():
    if isinstance(value, dict):
      yield from _numbers(value)
      continue
    first = value[0] if isinstance(value, tuple) and value else value
    if isinstance(first, int | float) and not isinstance(first, bool):
      yield values, name


class ConfigTest(hostile.ReaderTest, parameterized.TestCase):
  @parameterized.product(family=_FAMILIES, value=_EXTREMES)
  def test_every_number_has_a_finite_range_and_a_name(self, family, value):
    values = _sections(family)
    for section, name in _numbers(values):
      old = section[name]
      section[name] = (value,) * len(old) if isinstance(old, tuple) else value
      with self.assertRaises(ValueError, msg=f"{name} = {value}") as context:
        parse.from_config_dict(values)
      self.assertIn(name, str(context.exception))
      section[name] = old

  @hostile.examples(150)
  @given(st.sampled_from(_FAMILIES), st.data())
  def test_altered_config(self, family, data):
    values = data.draw(hostile.altered(_sections(family)))
    if isinstance(values, dict):
      self.check(parse.from_config_dict, values)

  @hostile.examples(60)
  @given(st.sampled_from(_FAMILIES), st.data())
  def test_overrides(self, family, data):
    file = self.folder / "mine.py"
    file.write_text(
      f"def get_config(): return {{'model': {{'family': {family!r}}}}}\n"
    )
    names = [
      f"{section}.{field.name}"
      for section, kind in section_types(family).items()
      for field in dataclasses.fields(kind)
    ]
    override = st.tuples(st.sampled_from(names), st.sampled_from(_TEXTS))
    overrides = data.draw(st.lists(override, min_size=1, max_size=3))
    given_texts = [f"{name}={value}" for name, value in overrides]
    self.check(load_config, str(file), given_texts)
