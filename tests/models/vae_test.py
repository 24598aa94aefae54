"""The autoencoder: shapes, sizes, precision, posterior, large images.

Its numbers are held against the public release's in tests/parity.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.dit import VAEConfig
from moh_jax.convert.vae import abstract_vae
from moh_jax.models.vae import VAE

_CONFIG = VAEConfig(
  block_out_channels=(4, 8), layers_per_block=1, norm_groups=2
)
_B = 2


def _params(config: VAEConfig):
  """Random parameters, larger than the initial ones."""
  rng = np.random.default_rng(0)

  def draw(path, x):
    offset = 1.0 if path[-1].key == "scale" else 0.0
    return jnp.asarray(rng.normal(size=x.shape) / 5 + offset, x.dtype)

  return jax.tree_util.tree_map_with_path(draw, abstract_vae(config))


def _images(rows=8, columns=12) -> jax.Array:
  x = np.random.default_rng(1).uniform(-1, 1, size=(_B, rows, columns, 3))
  return jnp.asarray(x, jnp.float32)


@functools.cache
def _apply(config: VAEConfig, method: str = "__call__"):
  """Compiled once per config and method."""
  return jax.jit(functools.partial(VAE(config).apply, method=method))


def _shapes(config: VAEConfig, method: str, x: tuple[int, ...]):
  return jax.eval_shape(
    functools.partial(VAE(config).apply, method=method),
    {"params": abstract_vae(config)},
    jax.ShapeDtypeStruct(x, jnp.float32),
  )


class VAETest(parameterized.TestCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_shapes_and_float32_results(self, dtype):
    config = dataclasses.replace(_CONFIG, dtype=dtype)
    mean, logvar = _shapes(config, "encode", (_B, 8, 12, 3))
    chex.assert_shape([mean, logvar], (_B, 4, 6, 4))
    images = _shapes(config, "decode", (_B, 4, 6, 4))
    chex.assert_shape(images, (_B, 8, 12, 3))
    chex.assert_type([mean, logvar, images], jnp.float32)
    chex.assert_type(jax.tree.leaves(abstract_vae(config)), jnp.float32)

  def test_public_size(self):
    def count(tree):
      return sum(x.size for x in jax.tree.leaves(tree))

    counts = {k: count(v) for k, v in abstract_vae(VAEConfig()).items()}
    expected = {
      "encoder": 34_163_592,
      "decoder": 49_490_179,
      "quant_conv": 72,
      "post_quant_conv": 20,
    }
    self.assertEqual(counts, expected)
    mean, _ = _shapes(VAEConfig(), "encode", (1, 64, 32, 3))
    chex.assert_shape(mean, (1, 8, 4, 4))

  @parameterized.parameters(
    "use_quant_conv", "use_post_quant_conv", "mid_attention"
  )
  def test_parts_can_be_left_out(self, part):
    config = dataclasses.replace(_CONFIG, **{part: False})
    names = {
      path[-2].key
      for path, _ in jax.tree_util.tree_leaves_with_path(abstract_vae(config))
    }
    layer = {"mid_attention": "query"}.get(part, part.removeprefix("use_"))
    self.assertNotIn(layer, names)
    mean, _ = _shapes(config, "encode", (_B, 8, 8, 3))
    chex.assert_shape(mean, (_B, 4, 4, 4))

  def test_bfloat16_is_near_float32(self):
    variables, images = {"params": _params(_CONFIG)}, _images()
    want = _apply(_CONFIG)(variables, images)
    config = dataclasses.replace(_CONFIG, dtype="bfloat16")
    error = float(jnp.abs(_apply(config)(variables, images) - want).max())
    self.assertGreater(error, 0)
    self.assertLess(error, 0.05 * float(jnp.abs(want).max()))

  def test_call_decodes_the_mean(self):
    variables, images = {"params": _params(_CONFIG)}, _images()
    mean, _ = _apply(_CONFIG, "encode")(variables, images)
    out = _apply(_CONFIG, "decode")(variables, mean)
    want = _apply(_CONFIG)(variables, images)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(((1, 9, 8, 3),), ((1, 8, 8, 4),), ((8, 8, 3),))
  def test_images_that_do_not_fit_are_refused(self, shape):
    with self.assertRaisesRegex(
      ValueError, r"images of shape .* must be .*, 3\], .* multiples of 2"
    ):
      _shapes(_CONFIG, "encode", shape)

  def test_latents_that_do_not_fit_are_refused(self):
    with self.assertRaisesRegex(ValueError, "latents of shape"):
      _shapes(_CONFIG, "decode", (1, 8, 8, 3))

  @parameterized.parameters((-99.0, -30.0), (99.0, 20.0))
  def test_log_variance_is_clamped(self, bias, expected):
    params = _params(_CONFIG)
    params["quant_conv"]["bias"] = jnp.full(8, bias)
    encode = _apply(_CONFIG, "encode")
    _, logvar = encode({"params": params}, _images())
    np.testing.assert_array_equal(logvar, np.full(logvar.shape, expected))


if __name__ == "__main__":
  absltest.main()
