"""Pixels that are normalized on the device."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import DataConfig, TextDataConfig
from moh_jax.data.transforms import Normalize, normalizer


class PixelsTest(parameterized.TestCase):
  @parameterized.parameters(
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ((0.5,) * 3, (0.5,) * 3),
    ((0.3,), (0.37,)),
  )
  def test_all_values_are_those_of_numpy_up_to_rounding(self, mean, std):
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    image = np.repeat(image, len(mean), axis=-1)
    expected = Normalize(mean, std).map({"image": image[0]})["image"]
    ours = normalizer(DataConfig(mean=mean, std=std))({"image": image})
    self.assertEqual(ours["image"].dtype, jnp.float32)
    np.testing.assert_allclose(ours["image"][0], expected, rtol=0, atol=1.3e-6)

  def test_other_batches_stay_as_they_are(self):
    latents = {"image": jnp.ones((1, 2, 2, 4)), "label": jnp.ones(1)}
    text = {"tokens": jnp.ones((1, 4), jnp.int32)}
    data = DataConfig(mean=(0.5,) * 4, std=(0.5,) * 4)
    for config in (data, DataConfig()):
      ours = normalizer(config)(latents)
      jax.tree.map(np.testing.assert_array_equal, ours, latents)
    self.assertIs(normalizer(TextDataConfig())(text), text)


if __name__ == "__main__":
  absltest.main()
