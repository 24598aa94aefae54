"""The table of active heads: every pair once, in order, in few blocks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_jax.ops.pairs import (
  ActiveHeads,
  head_blocks,
)


def _check_table(test, mask, most, rows, group=1):
  """Every invariant of a table."""
  batch, tokens, heads = mask.shape
  table = jax.jit(head_blocks, static_argnums=(1, 2))(
    ActiveHeads(jnp.asarray(mask), most), rows, group
  )
  token, head, first = (
    np.asarray(x) for x in (table.token, table.head, table.first)
  )
  chex.assert_shape((table.token, table.head), [(None, rows), head.shape])
  used = int(first[-1])
  test.assertLessEqual(used, len(head))
  by_head = mask.reshape(batch, tokens, -1, group)  # key/value heads
  test.assertLen(first, batch * heads // group + 1)
  np.testing.assert_array_equal(table.rank, by_head.sum(-1).cumsum(1))

  pairs = []
  for t in range(used):
    test.assertTrue(first[head[t]] <= t < first[head[t] + 1])
    here = token[t][token[t] < tokens]
    test.assertNotEmpty(here)
    test.assertTrue((np.diff(here) >= 0).all())
    np.testing.assert_array_equal(token[t][len(here) :], tokens)
    last = t + 1 == first[head[t] + 1]
    test.assertTrue(last or len(here) == rows, "only a last block has gaps")
    pairs += [(head[t], n) for n in here]
  expected = np.repeat(
    np.argwhere(by_head.any(-1)), by_head.sum(-1)[by_head.any(-1)], axis=0
  )
  expected = [(b * heads // group + k, n) for b, n, k in expected]
  test.assertEqual(pairs, sorted(expected))
  np.testing.assert_array_equal(token[used:], tokens)

  _check_pair_rows(test, mask, table)
  held = np.asarray(table.pair) >= 0
  np.testing.assert_array_equal(token.reshape(-1) < tokens, held)
  head = np.repeat(head, rows)[held]
  pair = np.asarray(table.pair)[held]
  b, n, h = np.unravel_index(pair, mask.shape)
  np.testing.assert_array_equal(b * heads // group + h // group, head)
  np.testing.assert_array_equal(n, token.reshape(-1)[held])
  same = (np.diff(head) == 0) & (np.diff(n) == 0)
  test.assertTrue((np.diff(pair)[same] > 0).all())


def _check_pair_rows(test, mask, table):
  """Every active pair has a row, and every other row is empty."""
  pair, row = np.asarray(table.pair), np.asarray(table.row)
  test.assertEqual(row.shape, mask.shape)
  np.testing.assert_array_equal(table.active, mask)
  np.testing.assert_array_equal(row == len(pair), ~mask)
  np.testing.assert_array_equal(pair[row[mask]], np.flatnonzero(mask))
  test.assertEqual((pair >= 0).sum(), mask.sum())
  np.testing.assert_array_equal(pair[pair < 0], -1)


class TableTest(parameterized.TestCase):
  @given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.data(),
  )
  @settings(max_examples=20)
  @pytest.mark.integration
  def test_any_choice_of_heads(self, batch, tokens, heads, group, rows, data):
    heads *= group
    most = data.draw(st.integers(1, heads))
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    mask = np.zeros((batch, tokens, heads), bool)
    for b, n in np.ndindex(batch, tokens):
      count = rng.integers(0, most + 1)
      mask[b, n, rng.permutation(heads)[:count]] = True
    _check_table(self, mask, most, rows, group)

  def test_pairs_that_read_the_same_keys_fill_blocks_together(self):
    mask = np.random.default_rng(0).random((1, 64, 8)) < 0.5
    for group, empty in (1, 8), (4, 2):
      active = ActiveHeads(jnp.asarray(mask), 8)
      used = int(head_blocks(active, 16, group).first[-1])
      self.assertLess(used * 16 - mask.sum(), empty * 16)


class BoundTest(parameterized.TestCase):
  def test_no_token_keeps_more_heads_than_tables_have_room_for(self):
    mask = jnp.asarray([[[1, 1, 1, 1], [0, 1, 0, 1]], [[0] * 4] * 2], bool)
    active, factor = ActiveHeads(mask, 2).bounded()
    cut = [[[1, 1, 0, 0], [0, 1, 0, 1]], [[0] * 4] * 2]
    np.testing.assert_array_equal(active.mask, np.asarray(cut, bool))
    np.testing.assert_array_equal(factor[:, 0, 0, 0], [np.nan, 1])
