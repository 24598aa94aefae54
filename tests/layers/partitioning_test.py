"""Logical axis names to mesh axes."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

from moh_jax.layers.partitioning import constrain
from moh_jax.runtime.sharding import resolve_spec

_SIZES = {"data": 2, "fsdp": 2, "tensor": 4, "sequence": 1}
_RULES = (
  ("batch", ("data", "fsdp")),
  ("embed", "fsdp"),
  ("heads", "tensor"),
  ("mlp", ("tensor",)),
  ("tokens", "sequence"),
  ("layers", None),
)


def _resolve(names, shape):
  return tuple(resolve_spec(names, shape, _SIZES, _RULES))


class ResolveSpecTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      ("batch", None, "heads"),
      (8, 5, 4),
      (("data", "fsdp"), None, "tensor"),
    ),
    (("embed", "mlp"), (6, 12), ("fsdp", "tensor")),
    (("layers", "embed"), (4, 8), (None, "fsdp")),
    ((None, None), (4, 8), (None, None)),
    ((), (), ()),
  )
  def test_maps_each_dimension(self, names, shape, expected):
    self.assertEqual(_resolve(names, shape), expected)

  @parameterized.parameters((3, None), (6, None), (8, "tensor"))
  def test_indivisible_dimension_stays_whole(self, heads, expected):
    self.assertEqual(_resolve(("heads",), (heads,)), (expected,))

  def test_mesh_axis_is_used_once(self):
    self.assertEqual(_resolve(("heads", "mlp"), (8, 8)), ("tensor", None))
    self.assertEqual(
      _resolve(("batch", "embed"), (8, 8)), (("data", "fsdp"), None)
    )

  def test_earlier_rule_gets_the_mesh_axis(self):
    self.assertEqual(
      _resolve(("embed", "batch"), (8, 8)), (None, ("data", "fsdp"))
    )

  def test_of_several_axes_the_first_that_divide_are_used(self):
    self.assertEqual(_resolve(("batch",), (6,)), ("data",))
    self.assertEqual(_resolve(("batch",), (3,)), (None,))

  def test_indivisible_dimension_leaves_its_axis_to_the_next(self):
    self.assertEqual(_resolve(("heads", "mlp"), (3, 8)), (None, "tensor"))

  def test_mesh_axis_of_one_device_is_left_out(self):
    self.assertEqual(_resolve(("tokens",), (8,)), (None,))

  def test_unknown_name_raises_listing_the_known(self):
    with self.assertRaisesRegex(ValueError, r"'head' .*'batch', 'embed'"):
      _resolve(("batch", "head"), (8, 4))

  def test_names_must_match_the_rank(self):
    with self.assertRaises(ValueError):
      _resolve(("batch",), (8, 4))


class ConstrainTest(absltest.TestCase):
  def _mesh(self):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return jax.sharding.Mesh(devices, ("data", "tensor"))

  def test_is_the_identity_without_a_mesh(self):
    x = jnp.ones((4, 3))
    with nn.logical_axis_rules((("batch", "data"),)):
      self.assertIs(constrain(x, "batch", None), x)

  def test_is_the_identity_without_rules(self):
    x = jnp.ones((4, 3))
    with jax.set_mesh(self._mesh()):
      self.assertIs(constrain(x, "batch", None), x)

  def test_shards_by_the_rules_under_a_mesh(self):
    rules = (("batch", "data"), ("heads", "tensor"))
    x = jnp.arange(24.0).reshape(4, 3, 2)
    with jax.set_mesh(self._mesh()), nn.logical_axis_rules(rules):
      out = jax.jit(lambda x: 2 * constrain(x, "batch", "heads", None))(x)
    # Three heads do not divide over two devices.
    expected = jax.sharding.NamedSharding(self._mesh(), PartitionSpec("data"))
    self.assertTrue(out.sharding.is_equivalent_to(expected, out.ndim))
    chex.assert_trees_all_equal(np.asarray(out), 2 * np.asarray(x))


if __name__ == "__main__":
  absltest.main()
