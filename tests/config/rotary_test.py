import math

from absl.testing import absltest, parameterized

from moh_jax.config import RotaryConfig


class RotaryConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ("scaling", "su", "('none', 'linear', 'dynamic', 'llama3', 'yarn')"),
    ("theta", 0.5, "at least 1"),
    ("theta", math.inf, "finite"),
    ("factor", 0.5, "at least 1"),
    ("original_length", 0, "at least 1"),
    ("low_freq_factor", 0.0, "above 0 and below"),
    ("low_freq_factor", 4.0, "below rope.high_freq_factor=4.0"),
    ("beta_slow", 0.0, "above 0 and at most"),
    ("beta_slow", 33.0, "at most rope.beta_fast=32.0"),
    ("attention_factor", 0.0, "above 0"),
  )
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      RotaryConfig(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"rope.{field}={value!r} must be ")
    self.assertIn(allowed, message)

  def test_yarn_needs_a_base_above_one(self):
    with self.assertRaisesRegex(ValueError, "rope.theta=1.0 must be above 1"):
      RotaryConfig(scaling="yarn", theta=1.0)

  @parameterized.parameters("theta", "factor", "original_length")
  def test_range_includes_one(self, field):
    self.assertEqual(getattr(RotaryConfig(**{field: 1}), field), 1)


if __name__ == "__main__":
  absltest.main()
