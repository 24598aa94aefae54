"""Meshes over several slices, of fake devices."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import ClassifierConfig, MeshConfig
from moh_jax.runtime import sharding
from moh_jax.training.classification import mix_images


def two_slices(first=(0, 3, 4, 5)):
  """Patch: the devices with these ids are slice 0, the others slice 1."""
  return mock.patch.object(
    sharding, "_slice_of", lambda device: int(device.id not in first)
  )


class SlicesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({},), ({"fsdp": 2},), ({"fsdp": 2, "tensor": 2},), ({"sequence": 4},)
  )
  def test_only_the_data_axis_crosses_slices(self, axes):
    with two_slices():
      mesh = sharding.make_mesh(MeshConfig(dcn_data=2, **axes))
      slice_of = np.vectorize(sharding._slice_of)(mesh.devices)
    self.assertEqual(mesh.shape["data"] % 2, 0)
    half = mesh.shape["data"] // 2
    np.testing.assert_array_equal(slice_of[:half], 0)
    np.testing.assert_array_equal(slice_of[half:], 1)

  @parameterized.parameters(
    (1, {}, "mesh.dcn_data=1 must be 2: the 8 devices are of 2 slice"),
    (3, {}, "mesh.dcn_data=3 must be 2"),
    (2, {"tensor": 8}, "must divide the 4 devices of a slice"),
    (2, {"data": 8}, "needs 8 devices, there are 4 devices of a slice"),
  )
  def test_what_does_not_fit_the_slices_is_refused(self, dcn, axes, message):
    with two_slices(), self.assertRaisesRegex(ValueError, message) as caught:
      sharding.make_mesh(MeshConfig(dcn_data=dcn, **axes))
    self.assertNotIn("\n", str(caught.exception))

  def test_slices_of_unequal_size_are_refused(self):
    with two_slices((0, 1, 2)), self.assertRaisesRegex(ValueError, r"\[3, 5\]"):
      sharding.make_mesh(MeshConfig(dcn_data=2))

  def test_one_slice_has_no_second(self):
    with self.assertRaisesRegex(ValueError, "dcn_data=2 must be 1"):
      sharding.make_mesh(MeshConfig(dcn_data=2))

  def test_dcn_data_must_be_positive(self):
    with self.assertRaisesRegex(ValueError, "mesh.dcn_data=0"):
      MeshConfig(dcn_data=0)


class MixupTest(absltest.TestCase):
  def test_images_are_mixed_inside_each_part(self):
    config = ClassifierConfig(mixup=0.8, cutmix=0.0)
    images = jnp.arange(8.0)[:, None, None, None] * jnp.ones((8, 2, 2, 1))
    targets = jax.nn.one_hot(jnp.arange(8), 8)
    key = jax.random.key(3)
    mixed, labels = mix_images(key, images, targets, config, 4)
    for part in range(4):
      rows = slice(2 * part, 2 * part + 2)
      alone = mix_images(key, images[rows], targets[rows], config)
      np.testing.assert_array_equal(mixed[rows], alone[0])
      np.testing.assert_array_equal(labels[rows], alone[1])
    self.assertGreater(float(jnp.abs(mixed - images).max()), 0)

  def test_a_part_of_one_image_is_refused(self):
    with self.assertRaisesRegex(ValueError, "a batch has 4 on 4"):
      mix_images(
        jax.random.key(0),
        jnp.ones((4, 2, 2, 1)),
        jnp.ones((4, 3)),
        ClassifierConfig(mixup=0.8),
        4,
      )


if __name__ == "__main__":
  absltest.main()
