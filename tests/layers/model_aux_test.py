"""Router side values of a whole model."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.layers.stack import collect_aux
from moh_jax.ops.routing import RouterAux


def _stack(losses, load, *, routed=True) -> RouterAux:
  """Side values of a scanned stack with the given losses and one load."""
  load = jnp.tile(jnp.asarray(load, jnp.float32), (len(losses), 1))
  losses = jnp.asarray(losses, jnp.float32)
  return RouterAux(losses, load, load, routed=routed)


def _layers(stack: RouterAux) -> list[RouterAux]:
  """The layers of a stack, one by one."""
  return [
    jax.tree.map(lambda x: x[layer], stack)  # noqa: B023
    for layer in range(len(stack.load))
  ]


_DENSE = _stack([0.0, 0.0], [1, 1], routed=False)
_ROUTED = _stack([1.0, 2.0, 6.0], [1, 0.5, 0.5, 0])


class CollectAuxTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("stacks", {"dense": _DENSE, "routed": _ROUTED}),
    ("list_of_stacks", [_DENSE, _ROUTED]),
    ("layers_in_a_tuple", (*_layers(_DENSE), *_layers(_ROUTED))),
    (
      "named_layers",
      {f"block{i}": aux for i, aux in enumerate(_layers(_ROUTED))}
      | {"dense0": _layers(_DENSE)[0], "dense1": _layers(_DENSE)[1]},
    ),
    ("both", [_DENSE, *_layers(_ROUTED)]),
  )
  def test_mean_over_routed_layers_and_share_over_all_heads(self, layers):
    aux = collect_aux(layers)
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_type([aux.balance_loss, aux.activated_share], jnp.float32)
    np.testing.assert_allclose(aux.balance_loss, 3.0)
    np.testing.assert_allclose(aux.activated_share, (4 + 6) / (4 + 12))
    self.assertIs(aux.layers, layers)

  def test_no_routed_layer_costs_nothing(self):
    aux = collect_aux({"dense": _DENSE})
    self.assertEqual(float(aux.balance_loss), 0.0)
    self.assertEqual(float(aux.activated_share), 1.0)

  def test_a_routed_layer_without_loss_counts_in_the_mean(self):
    aux = collect_aux([_ROUTED, *_layers(_stack([0.0], [1, 0]))])
    np.testing.assert_allclose(aux.balance_loss, (1 + 2 + 6 + 0) / 4)

  def test_jit_and_gradients_keep_what_layers_are(self):
    def loss(scale):
      layers = jax.tree.map(lambda x: scale * x, {"a": _DENSE, "b": _ROUTED})
      aux = collect_aux(layers)
      return aux.balance_loss, aux

    grad, aux = jax.jit(jax.grad(loss, has_aux=True))(2.0)
    np.testing.assert_allclose(grad, 3.0)
    self.assertEqual([x.routed for x in aux.layers.values()], [False, True])

  @parameterized.parameters(
    ({},), ([],), (_ROUTED,), ([(jnp.ones(3), _ROUTED)],)
  )
  def test_anything_but_side_values_raises(self, layers):
    with self.assertRaisesRegex(ValueError, "layers holds .* RouterAux"):
      collect_aux(layers)


if __name__ == "__main__":
  absltest.main()
