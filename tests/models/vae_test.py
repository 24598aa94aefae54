"""The autoencoder; its numbers are in tests/parity."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

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


def _images() -> jax.Array:
  x = np.random.default_rng(1).uniform(-1, 1, size=(_B, 8, 12, 3))
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

  @pytest.mark.integration
  def test_bfloat16_is_near_float32_and_gives_float32(self):
    variables, images = {"params": _params(_CONFIG)}, _images()
    want = _apply(_CONFIG)(variables, images)
    chex.assert_shape(want, images.shape)
    config = dataclasses.replace(_CONFIG, dtype="bfloat16")
    results = _shapes(config, "encode", images.shape), abstract_vae(config)
    got = _apply(config)(variables, images)
    chex.assert_type(jax.tree.leaves((results, got)), jnp.float32)
    error = float(jnp.abs(got - want).max())
    self.assertBetween(error, 1e-6, 0.05 * float(jnp.abs(want).max()))

  @parameterized.parameters(
    ("encode", (1, 9, 8, 3), r"images of shape .* \[batch, 8, 8, 3\]"),
    ("encode", (1, 8, 8, 4), "images of shape"),
    ("encode", (8, 8, 3), "images of shape"),
    ("decode", (1, 8, 8, 3), "latents of shape"),
  )
  def test_what_does_not_fit_is_refused(self, method, shape, message):
    with self.assertRaisesRegex(ValueError, message):
      _shapes(_CONFIG, method, shape)

  @parameterized.parameters((-99.0, -30.0), (99.0, 20.0))
  def test_log_variance_is_clamped(self, bias, expected):
    params = _params(_CONFIG)
    params["quant_conv"]["bias"] = jnp.full(8, bias)
    encode = _apply(_CONFIG, "encode")
    _, logvar = encode({"params": params}, _images())
    np.testing.assert_array_equal(logvar, np.full(logvar.shape, expected))
