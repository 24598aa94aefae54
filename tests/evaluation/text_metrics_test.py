import math

from absl.testing import absltest

from moh_jax.evaluation.text_metrics import bits_per_byte, perplexity


class TextMetricsTest(absltest.TestCase):
  def test_uniform_bytes_need_eight_bits(self):
    nats = 10 * math.log(256)
    self.assertAlmostEqual(bits_per_byte(nats, 10), 8)
    self.assertAlmostEqual(perplexity(nats, 10), 256)

  def test_units_are_what_one_counts(self):
    nats = 12 * math.log(4)  # twelve tokens, six words, forty-eight bytes
    self.assertAlmostEqual(perplexity(nats, 6), 16)
    self.assertAlmostEqual(bits_per_byte(nats, 48), 0.5)

  def test_perplexity_beyond_floats_is_infinite(self):
    self.assertEqual(perplexity(1e6, 1), math.inf)


if __name__ == "__main__":
  absltest.main()
