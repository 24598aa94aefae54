import dataclasses

from absl.testing import absltest, parameterized

from moh_jax.config.autoencoder import VAEConfig

_OUT_OF_RANGE = (
  ("dtype", "float16", "('float32', 'bfloat16')"),
  ("layers_per_block", 0, "at least 1"),
  ("image_channels", 0, "at least 1"),
  ("latent_channels", 0, "at least 1"),
  ("norm_groups", 0, "at least 1"),
  ("norm_eps", 0.0, "in [1e-12, 1]"),
  ("block_out_channels", (), "norm_groups=32"),
  ("block_out_channels", (64, 48), "multiples of vae.norm_groups=32"),
  ("block_out_channels", (64, 0), "multiples of vae.norm_groups=32"),
)


class VAEConfigTest(parameterized.TestCase):
  @parameterized.parameters(*_OUT_OF_RANGE)
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      dataclasses.replace(VAEConfig(), **{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"vae.{field}={value!r} must be ")
    self.assertIn(allowed, message)

  @parameterized.parameters(((32,), 1), ((32, 64), 2), ((64,) * 4, 8))
  def test_every_further_width_halves_the_sides(self, widths, downscale):
    config = VAEConfig(block_out_channels=widths)
    self.assertEqual(config.downscale, downscale)

  def test_defaults_are_the_public_sizes(self):
    self.assertEqual(VAEConfig().downscale, 8)


if __name__ == "__main__":
  absltest.main()
