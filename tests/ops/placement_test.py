"""Where heads lie on devices."""

import numpy as np
from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.placement import HeadPlacement, place_heads


class PlacementTest(parameterized.TestCase):
  @parameterized.parameters(
    (8, 8, 2, 1, (0, 2, 4, 6, 1, 3, 5, 7)),  # dealt like cards
    (8, 4, 2, 1, (0, 1, 4, 5, 2, 3, 6, 7)),  # pairs read one key/value head
    (6, 6, 3, 1, (0, 3, 1, 4, 2, 5)),
    (8, 8, 2, 2, (0, 4, 1, 5, 2, 6, 3, 7)),
    (8, 8, 1, 4, (0, 4, 1, 5, 2, 6, 3, 7)),
    (8, 2, 1, 4, (0, 2, 1, 3, 4, 6, 5, 7)),  # two devices a key/value head
    (8, 2, 2, 4, (0, 1, 2, 3, 4, 5, 6, 7)),
  )
  def test_heads_are_dealt(self, heads, kv_heads, devices, sequence, order):
    placement = place_heads(heads, kv_heads, devices, sequence)
    self.assertEqual(placement.order(heads), order)

  @parameterized.parameters((8, 4, 8, 1), (8, 8, 2, 8), (6, 3, 1, 4))
  def test_heads_that_devices_cannot_share_evenly(self, *shape):
    self.assertIsNone(place_heads(*shape))

  def test_no_token_has_more_active_heads_on_a_device(self):
    budget, rng = HeadBudget(12, 5, 3, 8), np.random.default_rng(0)
    for count in (2, 3, 4):
      placement = HeadPlacement(12, 12, count)
      mask = np.ones((4000, 12), bool)
      scores = rng.normal(size=(4000, budget.routed))
      mask[:, 5:] = scores >= np.sort(scores)[:, -3:-2]
      own = mask[:, placement.order(12)].reshape(4000, count, -1).sum(-1)
      expected, most = placement.active(budget)
      self.assertEqual(own.max(), most)
      self.assertAlmostEqual(own.mean(0).max(), expected, delta=0.05)
