import copy
import dataclasses
import pickle

from absl.testing import absltest

from moh_jax import config as config_lib
from moh_jax.config import Config

_DIT = Config(
  config_lib.DiTConfig(),
  diffusion=config_lib.DiffusionConfig(steps=500),
)


class ConfigTest(absltest.TestCase):
  def test_sections_of_the_family_are_attributes(self):
    self.assertEqual(_DIT.diffusion.steps, 500)
    self.assertEqual(list(_DIT.sections), ["diffusion", "sample"])

  def test_what_is_left_out_takes_its_defaults(self):
    self.assertEqual(_DIT.sample, config_lib.SampleConfig())
    self.assertEqual(_DIT.data, config_lib.DataConfig())
    llm = Config(config_lib.LLMConfig())
    self.assertEqual(llm.data, config_lib.TextDataConfig())

  def test_section_of_another_family_is_no_attribute(self):
    with self.assertRaisesRegex(AttributeError, "'tune', only .*'diffusion'"):
      _ = _DIT.tune
    self.assertFalse(hasattr(_DIT, "classifier"))

  def test_replace_changes_sections_of_the_family(self):
    sample = config_lib.SampleConfig(num=4)
    changed = dataclasses.replace(_DIT, sample=sample)
    self.assertEqual(changed.sample, sample)
    self.assertEqual(changed.diffusion, _DIT.diffusion)
    self.assertNotEqual(changed, _DIT)

  def test_copies_are_equal(self):
    for other in (copy.deepcopy(_DIT), pickle.loads(pickle.dumps(_DIT))):
      self.assertEqual(other, _DIT)
      self.assertEqual(hash(other), hash(_DIT))
      self.assertEqual(other.diffusion.steps, 500)

  def test_fields_cannot_be_set(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      _DIT.diffusion = config_lib.DiffusionConfig()


if __name__ == "__main__":
  absltest.main()
