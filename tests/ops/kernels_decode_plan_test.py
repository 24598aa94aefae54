"""Which heads and slots the decoding kernels read, and what surrounds them."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.ops.kernels import tpu_decode, triton_decode
from moh_jax.ops.kernels.attention import kernel_decode
from moh_jax.ops.kernels.problem import DecodeProblem, head_list
from tests.ops import devices
from tests.ops.decode_cases import BACKENDS, CASES, Case, small_tiles


class ListTest(parameterized.TestCase):
  @parameterized.product(share=(0.0, 0.5, 1.0), heads=(1, 9))
  def test_lists_hold_every_text_s_heads_in_order(self, share, heads):
    is_read = np.random.default_rng(0).random((5, heads)) < share
    most = max(1, is_read.sum(1).max())
    found = head_list(jnp.asarray(is_read), most)
    chex.assert_shape(found.head, (5, most))
    for row, head, count in zip(is_read, found.head, found.count):
      np.testing.assert_array_equal(head[:count], np.flatnonzero(row))

  @parameterized.parameters(*BACKENDS)
  def test_work_beside_the_kernel_is_linear_in_the_heads(self, backend):
    devices.need(backend)
    largest = {}
    for size in (16, 32):
      case = Case(heads=size, kv_heads=size, slots=1, head_dim=1)
      case = dataclasses.replace(case, seen=((0, 1),) * size, choice="all")
      call = functools.partial(
        kernel_decode, scale=1.0, backend=backend, interpret=True
      )
      jaxpr = jax.make_jaxpr(call)(
        *case.arrays(), *case.bounds(), case.active()
      )
      largest[size] = _largest(jaxpr.jaxpr)
    self.assertLessEqual(largest[32], 4 * largest[16])  # B * K is 4 times
    # R = 16 rows of a tile for each head, and a share of one more.
    self.assertLess(largest[32], 20 * 32 * 32)


def _largest(jaxpr) -> int:
  """Elements of the largest array outside of kernels."""
  largest = 0
  for equation in jaxpr.eqns:
    largest = max([largest, *(out.aval.size for out in equation.outvars)])
    if equation.primitive.name != "pallas_call":
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        largest = max(largest, _largest(inner))
  return largest


def _problem(case: Case) -> DecodeProblem:
  """The call as `kernel_decode` makes it, and nothing is run."""
  found = []

  def spy(problem, q):
    found.append(problem)
    return jnp.zeros(q.shape, jnp.float32)

  with mock.patch.object(tpu_decode, "attend", spy):
    kernel_decode(
      *case.arrays(), *case.bounds(), case.active(), 1.0, backend="mosaic_tpu"
    )
  return found[0]


def _expected_tiles(case: Case, keys: int) -> list[tuple[int, int, int]]:
  """Text, head and tile of all that must be read, found slot by slot."""
  visible = case.visible()
  return [
    (int(text), int(head), tile)
    for text, head in np.argwhere(case.is_read())
    for tile in range(-(-case.slots // keys))
    if visible[text, tile * keys : (tile + 1) * keys].any()
  ]


_READ = ("padding", "many_splits", "hidden_text", "first_text_chose_nothing",
         "grouped", "one_head", "all_heads", "no_table")  # fmt: skip


class ReadTest(parameterized.TestCase):
  """Which parts of the cache the kernels read, counted one by one."""

  @parameterized.parameters(*_READ)
  def test_a_tpu_fetches_the_visible_tiles_of_chosen_heads_once(self, name):
    case = CASES[name]
    plan = tpu_decode.Plan(_problem(case), 16)
    with small_tiles():
      tables = [np.asarray(x) for x in plan.tables()]
      fetched, before = [], None
      for step in np.ndindex(plan.grid):
        place = tuple(map(int, plan.place(*step, tables)))
        if place != before:  # else the tile is there already
          fetched.append((*divmod(place[0], case.kv_heads), place[1]))
        before = place
      self.assertEqual(fetched, _expected_tiles(case, plan.keys))

  @parameterized.parameters(*_READ)
  def test_splits_of_a_gpu_cover_the_visible_tiles_once(self, name):
    case = CASES[name]
    problem = _problem(case)
    with small_tiles():
      plan = triton_decode.Plan(problem, case.heads // case.kv_heads)
      grid, keys = plan.grid, plan.tile.keys
    if name == "many_splits":
      self.assertEqual(grid[2], 12)
    visited = []
    for text, entry, split in np.ndindex(grid):
      if entry < problem.heads.count[text]:
        bounds = problem.first[text], problem.end[text]
        begin, stop = triton_decode.split_tiles(*bounds, split, grid[2], keys)
        head = int(problem.heads.head[text, entry])
        visited += [(text, head, t) for t in range(int(begin), int(stop))]
    self.assertEqual(sorted(visited), _expected_tiles(case, keys))
    self.assertLen(visited, len(set(visited)))


class SplitTest(parameterized.TestCase):
  @given(st.integers(1, 700), st.integers(1, 20_000))
  def test_splits_are_not_small(self, programs, slots):
    splits = triton_decode.split_count(programs, slots)
    if splits > 1:
      self.assertGreaterEqual(slots // splits, 256)
      self.assertLessEqual(programs * splits, 512)

  @parameterized.parameters(
    (16, 4096, 16), (128, 4096, 4), (8 * 24, 4096, 2), (8 * 32, 4096, 2),
    (257, 4096, 1), (6, 7168, 28), (6, 1280, 5), (6, 448, 1), (6, 4099, 16),
  )  # fmt: skip
  def test_splits_fill_a_gpu(self, programs, slots, expected):
    self.assertEqual(triton_decode.split_count(programs, slots), expected)

  @parameterized.parameters((64, 64, 2), (128, 64, 2), (136, 16, 5))
  def test_programs_of_wide_heads_have_few_rows(self, head_dim, rows, tiles):
    case = Case(heads=70, kv_heads=1, head_dim=head_dim)
    plan = triton_decode.Plan(_problem(case), 70)
    self.assertEqual((plan.tile.rows, plan.row_tiles), (rows, tiles))


if __name__ == "__main__":
  absltest.main()
