"""Attention over tokens that devices share equals one device's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import MeshConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.ops import head_layout
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import unbox
from moh_jax.training.compiling import read_collectives
from tests.training import tiny

_BUDGET = HeadBudget(num_heads=8, shared=2, top_k=3, head_dim=4)
_SEGMENTS = jnp.asarray([[0] * 5 + [1] * 7 + [2] * 4, [0] * 16])


def _grad(layer):
  def loss(params, x):
    out, aux = layer.apply(params, x, places=Places(segments=_SEGMENTS))
    return jnp.square(out).sum() + aux.balance_loss

  return jax.jit(jax.value_and_grad(loss, (0, 1)))


class SequenceTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"sequence": 2, "tensor": 2}, 8, "dense"),
    ({"sequence": 2, "tensor": 2}, 2, "packed"),  # key/value heads repeated
    ({"sequence": 4}, 2, "packed"),
  )
  def test_causal_layer_equals_that_of_one_device(self, axes, kv_heads, form):
    layer = MoHAttention(
      _BUDGET,
      RouterConfig("query_norm"),
      num_kv_heads=kv_heads,
      causal=True,
      implementation=form,
    )
    x = jax.random.normal(jax.random.key(0), (2, 16, 12))
    params = unbox(layer.init(jax.random.key(1), x))
    params = jax.tree.map(lambda leaf: 20 * leaf, params)
    want = _grad(dataclasses.replace(layer, implementation="dense"))(params, x)
    count = int(np.prod(list(axes.values())))
    config = MeshConfig(data=1, **axes)
    mesh = sharding.make_mesh(config, jax.devices()[:count])
    with sharding.use_mesh(mesh):
      compiled = _grad(layer).lower(params, x).compile()
      got = compiled(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * abs(b).max())
    found = read_collectives(compiled.as_text(), dict(mesh.shape))
    kinds = {one.kind for one in found if one.axes == ("sequence",)}
    self.assertIn("all-to-all", kinds)
    self.assertNotIn("collective-permute", kinds)


class CheckTest(parameterized.TestCase):
  def test_tokens_and_heads_must_be_divisible(self):
    mesh = sharding.make_mesh(MeshConfig(sequence=8))
    with self.assertRaisesRegex(
      ValueError,
      r"mesh.tensor=1 with mesh.sequence=8: .* has 4 heads",
    ):
      head_layout.check_heads(tiny.LLM, mesh, 9.0)
    with self.assertRaisesRegex(ValueError, "mesh.sequence=8: .* 12 tokens"):
      head_layout.check_tokens(tiny.LLM, mesh, 12)
    head_layout.check_tokens(tiny.LLM, mesh, 16)


if __name__ == "__main__":
  absltest.main()
