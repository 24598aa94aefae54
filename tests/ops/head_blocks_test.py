"""The table of active heads: every pair once, blocks of one head, in order."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_jax.ops.head_blocks import (
  ActiveHeads,
  blocks_of,
  gather_rows,
  head_blocks,
  max_blocks,
  scatter_rows,
  sequence_rows,
)


def _check_table(test, mask, most, rows):
  """Every invariant of a table."""
  batch, tokens, heads = mask.shape
  table = jax.jit(head_blocks, static_argnums=1)(
    ActiveHeads(jnp.asarray(mask), most), rows
  )
  token, head, first = (
    np.asarray(x) for x in (table.token, table.head, table.first)
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

  _check_pair_rows(test, mask, table)
  held = np.asarray(table.pair) >= 0
  np.testing.assert_array_equal(token.reshape(-1) < tokens, held)


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
    st.integers(1, 9),
    st.data(),
  )
  @settings(max_examples=20)
  def test_any_choice_of_heads(self, batch, tokens, heads, rows, data):
    most = data.draw(st.integers(1, heads))
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    mask = np.zeros((batch, tokens, heads), bool)
    for b, n in np.ndindex(batch, tokens):
      count = rng.integers(0, most + 1)
      mask[b, n, rng.permutation(heads)[:count]] = True
    _check_table(self, mask, most, rows)

  @parameterized.parameters(1, 3, 8, 16)
  def test_every_pair(self, rows):
    mask = np.ones((2, 8, 3), bool)
    _check_table(self, mask, 3, rows)
    ours = blocks_of(None, (2, 8, 3), rows)
    theirs = head_blocks(ActiveHeads(jnp.asarray(mask), 3), rows)
    used = int(theirs.first[-1])
    for name, x in vars(theirs).items():
      if name in ("token", "head"):
        x = x[:used]
      x = x[: used * rows] if name == "pair" else x
      np.testing.assert_array_equal(getattr(ours, name), x, name)


class BoundTest(parameterized.TestCase):
  def test_no_token_keeps_more_heads_than_tables_have_room_for(self):
    mask = jnp.asarray([[[1, 1, 1, 1], [0, 1, 0, 1]], [[0] * 4] * 2], bool)
    active, factor = ActiveHeads(mask, 2).bounded()
    cut = [[[1, 1, 0, 0], [0, 1, 0, 1]], [[0] * 4] * 2]
    np.testing.assert_array_equal(active.mask, np.asarray(cut, bool))
    np.testing.assert_array_equal(factor[:, 0, 0, 0], [np.nan, 1])


class SequencesTest(parameterized.TestCase):
  @parameterized.product(group=(1, 2, 4), most=(1, 3, 4))
  def test_rows_fill_a_range_per_group_from_its_start(self, group, most):
    rng = np.random.default_rng(0)
    order = rng.permuted(np.tile(np.arange(4), (2, 5, 1)), axis=-1)
    mask = order < most
    mask[1, :, :2] = False
    table, lengths = sequence_rows(ActiveHeads(jnp.asarray(mask), most), group)
    _check_pair_rows(self, mask, table)
    ranges = np.asarray(table.pair).reshape(len(lengths), -1)
    self.assertEqual(ranges.shape, (8 // group, 5 * min(group, most)))
    counts = mask.reshape(2, 5, -1, group).sum((1, 3))
    np.testing.assert_array_equal(lengths, counts.reshape(-1))
    for i, (pairs, length) in enumerate(zip(ranges, lengths)):
      np.testing.assert_array_equal(pairs >= 0, np.arange(len(pairs)) < length)
      pairs = pairs[:length]
      self.assertTrue((np.diff(pairs) > 0).all())
      np.testing.assert_array_equal(pairs // 20, i * group // 4)
      np.testing.assert_array_equal(pairs % 4 // group, i % (4 // group))


class RowsTest(parameterized.TestCase):
  def test_gradients_are_those_of_autodiff(self):
    rng = np.random.default_rng(1)
    mask = jnp.asarray(rng.random((2, 7, 3)) < 0.5)
    x, y = (jnp.asarray(rng.normal(size=(2, 7, 3, 2))) for _ in range(2))
    table = head_blocks(ActiveHeads(mask, 3), 4)

    def loss(gather, scatter, x):
      rows = gather(x, table)
      return (scatter(jnp.sin(rows), table) * y).sum()

    def gather(x, table):
      return x.reshape(-1, 2).at[table.pair].get(mode="clip")

    def scatter(x, table):
      return x.at[table.row].get(mode="fill", fill_value=0)

    got = jax.grad(lambda x: loss(gather_rows, scatter_rows, x))(x)
    want = jax.grad(lambda x: loss(gather, scatter, x))(x)
    np.testing.assert_allclose(got, want, atol=1e-6)
