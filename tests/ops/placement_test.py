"""Where heads lie on devices."""

from absl.testing import parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.placement import place_heads


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

  def test_active_heads_of_the_device_that_has_most(self):
    # Heads 0, 2 and 4, of which two are shared; 1, 3 and 5, of which one is.
    expected, most = place_heads(6, 6, 2).active(HeadBudget(6, 3, 1, 8))
    self.assertAlmostEqual(expected, 2 + 1 / 3)
    self.assertEqual(most, 3)
