"""Batches that a thread sends to the devices ahead of the step."""

import time

import jax
import numpy as np
from absl.testing import absltest

from moh_jax.config import MeshConfig
from moh_jax.runtime import sharding
from moh_jax.training import feed


class _Counting:
  """Batch i holds i and takes a while; counts what is read."""

  def __init__(self, fails_at=None):
    self.position, self.closed, self._fails_at = 0, False, fails_at

  def __next__(self):
    time.sleep(0.02)
    if self.position == self._fails_at:
      raise ValueError(f"batch {self.position} is damaged")
    self.position += 1
    return {"x": np.full(4, self.position - 1, np.uint8)}

  def seek(self, position):
    self.position = position

  def close(self):
    self.closed = True


class FeedTest(absltest.TestCase):
  def _feed(self, ahead=2, **options):
    batches = _Counting(**options)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:2])
    made = feed.Feed(batches, mesh, ahead)
    self.addCleanup(made.close)
    return batches, made

  def test_batches_are_sharded_and_in_order_also_after_a_seek(self):
    _, made = self._feed()
    for i in (0, 1, 2, 7, 8):
      if i == 7:  # what was ahead is forgotten
        made.seek(7)
        self.assertEqual(made.position, 7)
      batch = next(made)["x"]
      np.testing.assert_array_equal(batch, np.full(4, i))
      self.assertLen(batch.addressable_shards, 2)
      self.assertEqual(made.position, i + 1)

  def test_reads_ahead_but_counts_what_was_taken(self):
    batches, made = self._feed(ahead=3)
    self.assertEqual(batches.position, 0)  # nothing before it is needed
    next(made)
    deadline = time.monotonic() + 10
    while batches.position < 4 and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.1)
    self.assertEqual((batches.position, made.position), (4, 1))

  def test_error_comes_where_the_batch_is_taken(self):
    batches, made = self._feed(fails_at=2)
    next(made), next(made)
    with self.assertRaisesRegex(ValueError, "batch 2 is damaged"):
      next(made)
    self.assertTrue(batches.closed)
