import functools
import math
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.layers import attend
from moh_jax.speed import layer as bench
from moh_jax.speed.layer import LayerOptions, layer_flops

_TINY = functools.partial(
  LayerOptions, lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,)
)


def _products(jaxpr):
  """FLOPs of every product in a program, 2 for each multiplication."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      total += 2 * math.prod(out) * math.prod(left[i] for i in contracted)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      total += _products(inner)
  return total


class FlopsTest(parameterized.TestCase):
  def _flops(self, shared, top_k, routed=True, mode="forward"):
    return layer_flops(
      HeadBudget(8, shared, top_k, 4),
      tokens=20,
      length=10,
      width=6,
      kv_heads=2,
      routed=routed,
      mode=mode,
    )

  @parameterized.parameters(
    # Shared, top-K, and the router's scores: routed, shared, groups.
    (2, 3, 6 + 2 + 2),
    (1, 3, 7 + 0 + 2),
    (0, 3, 8),
    (5, 0, 5),
  )
  def test_counts_the_heads_at_work_and_the_router(self, shared, top_k, scores):
    active = shared + top_k
    multiplications = 20 * (
      6 * active * 4  # queries
      + 6 * 2 * 4 * 2  # keys, values
      + active * 10 * 4 * 2  # logits, mixed values
      + active * 4 * 6  # output
      + 6 * scores
    )
    self.assertEqual(self._flops(shared, top_k), 2 * multiplications)
    both = self._flops(shared, top_k, mode="forward_backward")
    self.assertEqual(both, 6 * multiplications)

  def test_multi_head_attention_uses_every_head(self):
    flops = self._flops(2, 3, routed=False)
    multiplications = 20 * (6 * 8 * 4 * 2 + 6 * 2 * 4 * 2 + 8 * 10 * 4 * 2)
    self.assertEqual(flops, 2 * multiplications)

  @parameterized.parameters("forward", "forward_backward")
  def test_multi_head_attention_has_the_products_of_the_program(self, mode):
    options = _TINY(kv_heads=2, width=24, batch=2)
    x = jnp.zeros((2, 16, 24))
    params = bench._random_params(options, None)
    run = bench._evaluation(options, None, mode, "dense")
    program = jax.make_jaxpr(run)(params, x, x)
    flops = layer_flops(
      options.budgets()[0],
      tokens=32,
      length=16,
      width=24,
      kv_heads=2,
      routed=False,
      mode=mode,
    )
    self.assertEqual(_products(program.jaxpr), flops)


class MeasureTest(parameterized.TestCase):
  def test_routed_layers_stand_beside_multi_head_attention(self):
    rows = bench.measure(
      _TINY(
        kv_heads=2,
        shares=(50, 100),
        modes=("forward", "causal_forward_backward"),
        implementations=("packed",),
      ),
    )
    forms = [(1.0, "mha"), (0.5, "packed"), (1.0, "packed")]
    self.assertEqual([(r.share, r.implementation) for r in rows], forms * 2)
    self.assertEqual([r.name for r in rows if r.fault], [])
    self.assertEqual(rows[0].ratio_to_mha, 1.0)
    self.assertLess(rows[1].flops, rows[0].flops)

  def test_wrong_form_is_found(self):
    def wrong(*args, implementation, **options):
      out = moh_attention(*args, implementation="dense", **options)
      return out * (1.01 if implementation == "packed" else 1)

    moh_attention = attend.attention
    options = _TINY(modes=("forward_backward",), implementations=("packed",))
    with mock.patch.object(attend, "attention", wrong):
      rows = bench.measure(options)
    self.assertEqual([row.fault is None for row in rows], [True, False])


if __name__ == "__main__":
  absltest.main()
