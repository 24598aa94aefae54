"""The table of active heads: every pair once, blocks of one head, in order."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_jax.ops.head_blocks import (
  ActiveHeads,
  all_blocks,
  gather_rows,
  head_blocks,
  max_blocks,
  scatter_rows,
)


def _check_table(test, mask, most, rows):
  """Every invariant of a table."""
  batch, tokens, heads = mask.shape
  table = jax.jit(head_blocks, static_argnums=1)(
    ActiveHeads(jnp.asarray(mask), most), rows
  )
  token, head, first, row = (
    np.asarray(x) for x in (table.token, table.head, table.first, table.row)
  )
  blocks = max_blocks(batch, tokens, heads, most, rows)
  chex.assert_shape((table.token, table.head), [(blocks, rows), (blocks,)])
  used = int(first[-1])
  test.assertLessEqual(used, blocks)

  pairs = []
  for t in range(used):
    test.assertTrue(first[head[t]] <= t < first[head[t] + 1])
    here = token[t][token[t] < tokens]
    test.assertNotEmpty(here)
    test.assertTrue((np.diff(here) > 0).all())
    np.testing.assert_array_equal(token[t][len(here) :], tokens)
    last = t + 1 == first[head[t] + 1]
    test.assertTrue(last or len(here) == rows, "only a last block has gaps")
    pairs += [(head[t], n) for n in here]
  expected = mask.swapaxes(1, 2).reshape(-1, tokens)
  test.assertEqual(sorted(pairs), sorted(zip(*np.nonzero(expected))))
  np.testing.assert_array_equal(token[used:], tokens)

  np.testing.assert_array_equal(row == blocks * rows, ~expected)
  places = row[expected]
  test.assertLen(set(places.tolist()), len(places))
  np.testing.assert_array_equal(
    token.reshape(-1)[places], np.nonzero(expected)[1]
  )


class TableTest(parameterized.TestCase):
  @given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 9),
    st.data(),
  )
  @settings(max_examples=40)
  def test_any_choice_of_heads(self, batch, tokens, heads, rows, data):
    most = data.draw(st.integers(1, heads))
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    mask = np.zeros((batch, tokens, heads), bool)
    for b, n in np.ndindex(batch, tokens):
      count = rng.integers(0, most + 1)
      mask[b, n, rng.permutation(heads)[:count]] = True
    _check_table(self, mask, most, rows)

  @parameterized.parameters(1, 3, 4, 8, 16)
  def test_all_tokens_on_one_head(self, rows):
    mask = np.zeros((2, 8, 4), bool)
    mask[:, :, 2] = True
    _check_table(self, mask, 1, rows)

  def test_no_pair_at_all(self):
    mask = np.zeros((1, 5, 3), bool)
    _check_table(self, mask, 2, 4)

  @parameterized.parameters(1, 3, 8, 16)
  def test_every_pair(self, rows):
    mask = np.ones((2, 8, 3), bool)
    _check_table(self, mask, 3, rows)
    ours = all_blocks(2, 8, 3, rows)
    theirs = head_blocks(ActiveHeads(jnp.asarray(mask), 3), rows)
    used = int(theirs.first[-1])
    self.assertLen(ours.token, used)
    np.testing.assert_array_equal(ours.token, theirs.token[:used])
    np.testing.assert_array_equal(ours.head, theirs.head[:used])
    np.testing.assert_array_equal(ours.first, theirs.first)
    np.testing.assert_array_equal(ours.row, theirs.row)

  @parameterized.parameters((0, 1), (4, 0))
  def test_sizes_below_one_are_refused(self, rows, most):
    active = ActiveHeads(jnp.ones((1, 2, 2), bool), most)
    with self.assertRaisesRegex(
      ValueError, f"rows={rows} and max_per_token={most}"
    ):
      head_blocks(active, rows)


class RowsTest(parameterized.TestCase):
  def test_gathered_rows_return_to_their_pairs(self):
    rng = np.random.default_rng(0)
    mask = rng.random((2, 7, 3)) < 0.5
    x = jnp.asarray(rng.normal(size=(2, 7, 3, 4)), jnp.float32)
    table = head_blocks(ActiveHeads(jnp.asarray(mask), 3), 4)
    rows = gather_rows(x, table)
    empty = np.asarray(table.token).reshape(-1) == 7
    np.testing.assert_array_equal(rows[empty], 0.0)
    back = scatter_rows(rows, table, 3)
    np.testing.assert_array_equal(back, np.where(mask[..., None], x, 0.0))


if __name__ == "__main__":
  absltest.main()
