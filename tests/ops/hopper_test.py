"""The Hopper kernels in Pallas's simulator, against float64."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels import hopper_program
from moh_jax.ops.kernels.hopper import KeyLaunch, RowLaunch
from moh_jax.ops.kernels.hopper_program import Ring
from moh_jax.ops.kernels.problem import BlockSizes, Tile
from tests.ops import cases
from tests.ops.cases import Case


def _case(tokens=100, **options) -> Case:
  shape = {"batch": 1, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
  sizes = {"queries": tokens, "keys": tokens, "scale": 0.125}
  return Case(**shape | sizes | options)


_FORWARD, _KEYS = (128, 64), (64, 128)  # rows and keys of tiles
_CASES = {
  "bidirectional": (_case(150), _FORWARD, _KEYS),
  "causal": (_case(causal=True, kv_heads=1, batch=2), _FORWARD, _KEYS),
  "masks": (
    _case(
      causal=True, segments=True, key_mask=True, batch=2, dtype="float16"
    ), _FORWARD, _KEYS,
  ),
  "one_consumer": (_case(128, segments=True, scale=-0.3), (64, 64), _KEYS),
  "large_head": (_case(head_dim=256, causal=True), _FORWARD, (64, 64)),
  "head_dim_96": (_case(64, head_dim=96, kv_heads=4), _FORWARD, _KEYS),
}  # fmt: skip
# The interpreter takes 10 to 20 s for each: `pytest -m slow` runs the others.
_ALWAYS = ("causal", "masks")


def _check(name: str, **changes) -> None:
  case, forward, keys = _CASES[name]
  case = dataclasses.replace(case, **changes)
  sizes = BlockSizes.of(forward, forward, keys)
  call = functools.partial(cases.evaluate, "mosaic_gpu", case, sizes=sizes)
  got = jax.jit(lambda *x: call(*x))(case.arrays(), case.blocks(forward[0]))
  chex.assert_type(got, case.dtype)
  cases.check(got, cases.reference(case), 2e-2, 2e-2)


class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(*_ALWAYS)
  def test_equals_float64(self, name):
    _check(name)

  @parameterized.parameters(*sorted(_CASES.keys() - _ALWAYS))
  @pytest.mark.slow
  def test_other_cases_equal_float64(self, name):
    _check(name)

  @parameterized.parameters(*sorted(_CASES))
  @pytest.mark.slow
  def test_nothing_unwritten_is_read_and_no_slot_while_it_is_filled(self, name):
    # Whole tiles: what a copy reads beyond an array would be NaN too. JAX 0.10
    # detects no races of GPUs, which is no error of its own.
    params = dataclasses.replace(
      hopper_program._interpreter(),
      detect_races=True,
      uninitialized_memory="nan",
      out_of_bounds_reads="raise",
    )
    release = Ring.release

    def committed(ring, step):
      # Products read shared memory as copies do, but here as threads do.
      plgpu.commit_smem()
      release(ring, step)

    with (
      mock.patch.object(hopper_program, "_interpreter", lambda: params),
      mock.patch.object(Ring, "release", committed),
    ):
      _check(name, queries=128, keys=128)


class TablesTest(parameterized.TestCase):
  @parameterized.parameters("bidirectional", "causal")
  def test_every_tile_is_visited_once(self, name):
    problem = _case(900, batch=3, causal=name == "causal").problem(64)
    table, used = RowLaunch(problem, Tile(64, 64), 1).table()
    tiles = np.asarray(table)[:, 0]
    np.testing.assert_array_equal(np.sort(tiles), np.arange(len(tiles)))
    self.assertLess(int(used[0]), len(tiles))
    self.assertTrue((tiles[: int(used[0])] < int(used[0])).all())

    case = _case(900, batch=3, causal=name == "causal")
    table = KeyLaunch(case.problem(128), Tile(64, 128), 2).table()
    expected = np.ndindex(8, case.batch, case.kv_heads)
    self.assertCountEqual(map(tuple, np.asarray(table).tolist()), expected)
