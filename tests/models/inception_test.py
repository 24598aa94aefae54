"""The network of FID and its input; tests/parity has the recorded numbers."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.models.inception import POOL_DIM, SPATIAL_DIM, InceptionV3, prepare


class InceptionTest(absltest.TestCase):
  def test_features_have_their_shapes(self):
    features, variables = jax.eval_shape(
      InceptionV3().init_with_output,
      jax.random.key(0),
      jax.ShapeDtypeStruct((2, 299, 299, 3), jnp.float32),
    )
    self.assertEqual(features.pool3.shape, (2, POOL_DIM))
    self.assertEqual(features.spatial.shape, (2, 17, 17, 7))
    self.assertEqual(features.spatial.size, 2 * SPATIAL_DIM)
    self.assertEqual(features.logits.shape, (2, 1008))
    leaves = jax.tree.leaves(variables["params"])
    self.assertEqual(sum(leaf.size for leaf in leaves), 23_885_392)


_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"


def _ramp(length):
  """[1, length, length, 3] that grows by 10 per column."""
  row = 10 * np.arange(length, dtype=np.uint8)
  return np.broadcast_to(row[None, None, :, None], (1, length, length, 3))


class PrepareTest(parameterized.TestCase):
  @parameterized.product(letter=("a", "b", "c"), resize=("tf1", "ptfid"))
  def test_compiled_equals_the_record(self, letter, resize):
    tolerances = json.loads((_CASE / "meta.json").read_text())["tolerance"]
    name = f"{letter}_{resize}_input_grid"
    with np.load(_CASE / "io.npz") as stored:
      images, want = stored[f"images_{letter}"], stored[name]
      grid = stored["input_grid_index"]
    compiled = jax.jit(functools.partial(prepare, resize=resize))
    got = np.asarray(compiled(images))[:, grid][:, :, grid]
    atol = tolerances["outputs_atol"][name]
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)

  @parameterized.parameters(
    # Halving: even columns, or the mean of two; white is 1 only for ptfid.
    ("tf1", [0, 20, 40], lambda x: (x - 128) / 128),
    ("ptfid", [5, 25, 45], lambda x: 2 * x / 255 - 1),
  )
  def test_shrinks_without_antialiasing(self, resize, pixels, scale):
    got = prepare(_ramp(6), resize, 3)
    want = np.broadcast_to(scale(np.array(pixels, float)), (3, 3))
    np.testing.assert_allclose(got[0, :, :, 1], want, atol=1e-6)

  @parameterized.parameters(
    ("tf1", [0, 5, 10, 15, 20, 20]), ("ptfid", [0, 2.5, 7.5, 12.5, 17.5, 20])
  )
  def test_enlarges_up_to_the_border(self, resize, pixels):
    got = np.asarray(prepare(_ramp(3), resize, 6), np.float64)[0, :, :, 0]
    got = got * 128 + 128 if resize == "tf1" else (got + 1) * 127.5
    np.testing.assert_allclose(got, np.tile(pixels, (6, 1)), atol=1e-4)
