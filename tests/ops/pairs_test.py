"""The table of active heads: every pair once, in order, in few blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from moh_jax.ops.pairs import ActiveHeads, head_blocks


def _check_table(test, mask, most, rows, group=1):
  """Every invariant of a table."""
  batch, tokens, heads = mask.shape
  table = jax.jit(head_blocks, static_argnums=(1, 2))(
    ActiveHeads(jnp.asarray(mask), most), rows, group
  )
  pair, row, token, head, first = (
    np.asarray(getattr(table, name))
    for name in ("pair", "row", "token", "head", "first")
  )
  by_head = mask.reshape(batch, tokens, -1, group)  # key/value heads
  np.testing.assert_array_equal(table.rank, by_head.sum(-1).cumsum(1))
  blocks, numbers = pair.reshape(-1, rows), np.arange(mask.size)
  numbers = numbers.reshape(by_head.shape)
  test.assertLessEqual(first[-1], len(blocks))
  for index, (b, k) in enumerate(np.ndindex(batch, heads // group)):
    own = slice(first[index], first[index + 1])
    # By token, then by head, without gaps but in the last block.
    want, found = numbers[b, :, k][by_head[b, :, k]], blocks[own].reshape(-1)
    test.assertLen(blocks[own], -(-len(want) // rows))
    np.testing.assert_array_equal(found[: len(want)], want)
    np.testing.assert_array_equal(found[len(want) :], -1)
    np.testing.assert_array_equal(head[own], index)
  np.testing.assert_array_equal(blocks[first[-1] :], -1)
  tokens_of = np.where(pair < 0, tokens, pair // heads % tokens)
  np.testing.assert_array_equal(token.reshape(-1), tokens_of)
  # The inverse.
  np.testing.assert_array_equal(table.active, mask)
  np.testing.assert_array_equal(pair[row[mask]], np.flatnonzero(mask))
  np.testing.assert_array_equal(row[~mask], len(pair))


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
