"""What heads of a language model are worth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import HeadBudget, RouterConfig
from moh_jax.config.heads import Units
from moh_jax.evaluation.probe import (
  head_importance,
  order_by_importance,
  text_probe,
  top_k_by_importance,
)
from moh_jax.layers.vocabulary import summed_nats
from moh_jax.models.llm import LLM, output_kernel
from moh_jax.runtime.sharding import unbox
from tests.training import tiny

_B, _N = 2, 16


def _batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, tiny.LLM.vocab_size, (_B, _N + 1))
  weights = np.ones((_B, _N), np.float32)
  weights[1, 9:] = 0.0
  return {
    "inputs": jnp.asarray(tokens[:, :-1], jnp.int32),
    "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
    "positions": jnp.broadcast_to(jnp.arange(_N), (_B, _N)),
    "segments": jnp.zeros((_B, _N), jnp.int32),
    "weights": jnp.asarray(weights),
  }


@functools.cache
def _params(config):
  init = jax.jit(LLM(config).init)
  params = init(jax.random.key(0), _batch()["inputs"])["params"]
  return jax.tree.map(lambda x: 10 * x, unbox(params))


@functools.partial(jax.jit, static_argnums=0)
def _mean_nats(config, params, row, scale):
  """Mean loss of one sequence whose heads are scaled by [layers, H]."""
  batch = jax.tree.map(lambda x: x[row][None], _batch())
  x, _ = LLM(config).apply(
    {"params": params},
    batch["inputs"],
    segments=batch["segments"],
    head_scale=scale,
    with_logits=False,
  )
  weights = batch["weights"] / batch["weights"].sum()
  kernel = output_kernel(params, config)
  return summed_nats(x, kernel, batch["targets"], weights, config.loss_chunk)


class ImportanceTest(parameterized.TestCase):
  @parameterized.parameters("two_stage", "none")
  def test_is_the_slope_of_the_loss(self, router):
    # With the router "none" all heads count, whatever the budget says.
    config = dataclasses.replace(tiny.LLM, router=RouterConfig(router))
    params = _params(config)
    found = head_importance(LLM(config), config, params, [_batch()])
    ones = np.ones((config.depth, config.num_heads[0]), np.float32)
    slopes = np.zeros_like(ones)
    for place in np.ndindex(slopes.shape):
      step = np.zeros_like(ones)
      step[place] = 0.002
      for row in range(_B):
        ends = [
          float(_mean_nats(config, params, row, ones + sign * step))
          for sign in (1, -1)
        ]
        slopes[place] += abs(ends[0] - ends[1]) / 0.004 / _B
    slopes /= np.sqrt(np.square(slopes).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, slopes, atol=0.01)
    np.testing.assert_allclose(np.square(found).sum(-1), 1.0, rtol=1e-6)

  def test_order_is_that_of_the_values(self):
    order = order_by_importance(np.array([[0.1, 0.7, 0.2], [0.5, 0.5, 0.6]]))
    self.assertEqual(order, ((1, 2, 0), (2, 0, 1)))  # equal ones keep theirs

  def test_top_k_goes_to_the_layers_where_heads_are_worth_most(self):
    importance = np.array(
      [[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.9, 0.1], [0.5, 0.5, 0.5, 0.5]]
    )
    budgets = [HeadBudget(4, 1, 2, 8)] * 2 + [HeadBudget(4, 4, 0, 8)]
    order = np.array([[0, 1, 2, 3], [2, 0, 1, 3], [0, 1, 2, 3]])
    # The second layer's best head is shared, so its others are worth little.
    units = [Units(budget) for budget in budgets]
    found = top_k_by_importance(importance, units, order)
    self.assertEqual(found, (3, 1, 0))
    # Two heads a group and two groups: a routed head of each, or a group.
    importance = np.array([[0.9, 0.1, 0.2, 0.3], [0.8, 0.6, 0.4, 0.7]])
    for size, parts, top_k in ((1, 2, (2, 2)), (2, 1, (2, 2))):
      budget = HeadBudget(4 // size, 0, 2 // size, 8, parts)
      units = [Units(budget, size)] * 2
      found = top_k_by_importance(importance, units, [range(4)] * 2)
      self.assertEqual(found, top_k)
    more = [Units(HeadBudget(4, 0, 2, 8, 2)), Units(HeadBudget(4, 0, 4, 8, 2))]
    found = top_k_by_importance(importance, more, [range(4)] * 2)
    self.assertEqual(found, (2, 4))  # 0.6 + 0.4 is more than 0.1 + 0.2

  def test_layers_of_different_numbers_of_heads(self):
    config = dataclasses.replace(tiny.LLM, num_heads=(4, 2), top_k=(2, 1))
    run = dataclasses.replace(tiny.llm_config(), model=config)
    probe = text_probe(LLM(config), run)
    self.assertIsNone(probe.importance)  # `heads` goes on without it
