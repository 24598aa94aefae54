"""Overlapping patch embedding."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.layers.mlp import OverlapPatchEmbed


def _images(rows, columns, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.normal(size=(2, rows, columns, 3)), dtype)


def _params(module, images):
  shapes = jax.eval_shape(
    lambda: nn.unbox(module.init(jax.random.key(0), images))
  )
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
  )


class OverlapPatchEmbedTest(parameterized.TestCase):
  @parameterized.product(
    size=((8, 12), (7, 9), (1, 1)),
    kernel=((7, 4), (3, 2)),
    dtype=(jnp.float32, jnp.bfloat16),
  )
  def test_shape_is_the_ceiling_of_the_stride(self, size, kernel, dtype):
    kernel_size, stride = kernel
    module = OverlapPatchEmbed(6, kernel_size, stride, dtype=dtype)
    out, variables = jax.eval_shape(
      lambda x: module.init_with_output(jax.random.key(0), x), _images(*size)
    )
    expected = (2, *(-(-s // stride) for s in size), 6)
    chex.assert_shape(out, expected)
    chex.assert_type(out, dtype)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)

  @parameterized.parameters((3, 2), (7, 4))
  def test_equals_normalized_patches(self, kernel_size, stride):
    module, images = OverlapPatchEmbed(6, kernel_size, stride), _images(6, 9)
    variables = _params(module, images)
    stored = jax.tree.map(np.asarray, variables["params"])
    proj, norm = (stored[name] for name in ("proj", "norm"))
    reach = kernel_size // 2
    padded = np.pad(images, [(0, 0), (reach, reach), (reach, reach), (0, 0)])
    out = jax.jit(module.apply)(variables, images)
    for row, column in np.ndindex(*out.shape[1:3]):
      i, j = row * stride, column * stride
      patch = padded[:, i : i + kernel_size, j : j + kernel_size]
      x = np.einsum("bijk,ijkc->bc", patch, proj["kernel"]) + proj["bias"]
      x = x - x.mean(-1, keepdims=True)
      x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
      expected = x * norm["scale"] + norm["bias"]
      np.testing.assert_allclose(out[:, row, column], expected, atol=2e-5)


if __name__ == "__main__":
  absltest.main()
