"""Logical axis names to mesh axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec

from moh_jax.layers.partitioning import (
  constrain,
  draw_examples,
  examples_key,
  sum_examples,
)
from moh_jax.runtime.mesh import resolve_spec

_SIZES = {"data": 2, "fsdp": 2, "tensor": 4, "sequence": 1}
_RULES = (
  ("batch", ("data", "fsdp")),
  ("embed", "fsdp"),
  ("heads", "tensor"),
  ("mlp", ("tensor",)),
  ("tokens", "sequence"),
  ("layers", None),
)


class ResolveSpecTest(parameterized.TestCase):
  @parameterized.parameters(
    (("batch", None, "heads"), (8, 5, 4), (("data", "fsdp"), None, "tensor")),
    (("embed", "mlp"), (6, 12), ("fsdp", "tensor")),
    (("layers", "embed"), (4, 8), (None, "fsdp")),
    ((), (), ()),
    (("heads",), (6,), (None,)),  # four devices do not divide six
    (("heads", "mlp"), (8, 8), ("tensor", None)),  # an axis is used once
    (("heads", "mlp"), (3, 8), (None, "tensor")),
    (("embed", "batch"), (8, 8), (None, ("data", "fsdp"))),  # the first rule
    (("batch",), (6,), ("data",)),  # of several axes the first that divide
    (("batch",), (3,), (None,)),
    (("tokens",), (8,), (None,)),  # an axis of one device
  )
  def test_maps_each_dimension(self, names, shape, expected):
    spec = resolve_spec(names, shape, _SIZES, _RULES)
    self.assertEqual(tuple(spec), expected)

  @parameterized.parameters(
    (("batch", "head"), r"'head' .*'batch', 'embed'"), (("batch",), "zip")
  )
  def test_unknown_names_and_other_ranks_raise(self, names, message):
    with self.assertRaisesRegex(ValueError, message):
      resolve_spec(names, (8, 4), _SIZES, _RULES)


class ConstrainTest(absltest.TestCase):
  def test_is_the_identity_without_a_mesh_or_rules(self):
    x = jnp.ones((4, 3))
    with nn.logical_axis_rules((("batch", "data"),)):
      self.assertIs(constrain(x, "batch", None), x)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
      self.assertIs(constrain(x, "batch", None), x)


class ExamplesTest(absltest.TestCase):
  """What a step does where devices compute with their own examples."""

  def _on_devices(self, function, x, lowered=False):
    """Calls it with the rows of each of four devices, and joins the results.

    Or returns the text of the program.
    """
    devices = np.array(jax.devices()[:4]).reshape(2, 2, 1)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
    spec = PartitionSpec(("data", "fsdp"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(_RULES):
      mapped = jax.shard_map(
        function, in_specs=spec, out_specs=spec, check_vma=False
      )
      if lowered:
        return jax.jit(mapped).lower(x).as_text()
      return np.asarray(jax.jit(mapped)(x))

  def test_keys_of_devices_differ(self):
    def draw(x):
      return jax.random.uniform(examples_key(jax.random.key(0)), x.shape)

    self.assertLen(np.unique(self._on_devices(draw, jnp.zeros(8))), 8)

  def test_devices_sample_the_values_of_their_own_examples(self):
    def draw(x):
      return draw_examples(jax.random.normal, jax.random.key(0), x.shape)

    x = jnp.zeros((8, 1000))
    sampled = self._on_devices(draw, x)
    np.testing.assert_array_equal(sampled, jax.jit(draw)(x))
    # Of other batches too the first examples have these values.
    np.testing.assert_array_equal(sampled[:3], jax.jit(draw)(x[:3]))
    self.assertLen(np.unique(sampled[:, 0]), 8)
    self.assertBetween(sampled.std(), 0.95, 1.05)
    text = self._on_devices(draw, x, lowered=True)
    self.assertIn("2x1000xui32", text)
    self.assertNotIn("8x1000xui32", text)

  def test_a_loss_of_sums_has_the_gradient_of_the_mean_over_devices(self):
    x = jnp.arange(8.0)

    def loss(x):
      sums = sum_examples({"sum": x.sum(), "squares": (x * x).sum()})
      return sums["sum"] * sums["squares"]

    value, grad = jax.value_and_grad(loss)(x)
    values = self._on_devices(lambda x: loss(x)[None], x)
    np.testing.assert_allclose(values, value, rtol=1e-6)
    grads = self._on_devices(jax.grad(loss), x)
    np.testing.assert_allclose(grads / 4, grad, rtol=1e-6)
