import math

from absl.testing import absltest, parameterized

from moh_jax.config import RotaryConfig


class RotaryConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ("scaling", "yarn", "('none', 'linear', 'dynamic', 'llama3')"),
    ("theta", 0.5, "at least 1"),
    ("theta", math.inf, "finite"),
    ("factor", 0.5, "at least 1"),
    ("original_length", 0, "at least 1"),
    ("low_freq_factor", 0.0, "above 0 and below"),
    ("low_freq_factor", 4.0, "below rope.high_freq_factor=4.0"),
  )
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      RotaryConfig(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"rope.{field}={value!r} must be ")
    self.assertIn(allowed, message)

  @parameterized.parameters("theta", "factor", "original_length")
  def test_range_includes_one(self, field):
    self.assertEqual(getattr(RotaryConfig(**{field: 1}), field), 1)


if __name__ == "__main__":
  absltest.main()
