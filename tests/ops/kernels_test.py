"""The GPU and TPU kernels, interpreted, against float64; that they lower."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.attention import TPU
from moh_jax.ops.call import Visible
from moh_jax.ops.kernels import hopper_program, tpu_plan
from moh_jax.ops.kernels.attention import (
  BlockSizes,
  block_sizes,
  keys_of_rows,
  rows_of_keys,
)
from moh_jax.ops.kernels.hopper_program import Ring
from moh_jax.ops.kernels.tpu_plan import Cut
from moh_jax.ops.pairs import ActiveHeads, head_blocks
from tests.ops import cases, devices
from tests.ops.cases import CASES, LANES, Case

# Several tiles of keys, and blocks of rows, in the smallest arrays.
_SIZES = BlockSizes.of(*[(16, 16)] * 3)


def _run(case, arrays=None, blocks=None):
  """Output and gradients of the TPU kernels with blocks of 16 rows."""
  arrays = case.arrays() if arrays is None else arrays
  blocks = case.blocks() if blocks is None else blocks
  return cases.results("mosaic_tpu", case, arrays, blocks, sizes=_SIZES)


class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(*CASES, *LANES)
  @pytest.mark.integration
  def test_equals_float64(self, name):
    case = {**CASES, **LANES}[name]
    cases.check(_run(case), cases.reference(case))

  @pytest.mark.integration
  def test_16_bits_are_close(self):
    case = CASES["grouped"]
    results = _run(case, arrays := case.arrays("bfloat16"))
    chex.assert_type(results, "bfloat16")
    cases.check(results, cases.reference(case, arrays), 2e-2, 2e-2)

  @pytest.mark.integration
  def test_keys_after_the_last_token_are_not_read(self):
    case = Case(causal=True)
    q, k, v, grad = case.arrays()
    early = np.arange(case.queries)[:, None] < 16
    active = ActiveHeads(jnp.asarray(case.active() & early), case.heads)
    after = (jnp.arange(case.keys) >= 16)[:, None, None]
    k, v = (jnp.where(after, jnp.nan, x) for x in (k, v))
    out, dq, _, _ = _run(case, [q, k, v, grad], head_blocks(active, 16))
    chex.assert_tree_all_finite((out, dq))
    self.assertGreater(float(jnp.abs(out).max()), 0)

  @pytest.mark.integration
  def test_rows_without_a_pair_have_no_query(self):
    case = Case(one_head=True)  # not the first one
    q, k, v, grad = case.arrays()
    foreign = q.at[0, 0, 0].set(100)  # logits of -1,000
    results, expected = (_run(case, [x, k - 3, v, grad]) for x in (foreign, q))
    chex.assert_tree_all_finite(results)
    chex.assert_trees_all_equal(results, expected)


class LoweringTest(parameterized.TestCase):
  """What a machine without the device can check: that kernels lower."""

  @parameterized.parameters(
    (72, "float32", ""), (64, "bfloat16", "causal"),
    (128, "float32", "causal key_mask segments"),
    (128, "bfloat16", "causal key_mask segments"),
  )  # fmt: skip
  def test_lowers_without_a_warning(self, dim, dtype, masks):
    masks = dict.fromkeys(masks.split(), True)
    case = Case(2, 200, 200, heads=8, kv_heads=4, head_dim=dim, **masks)
    rows = block_sizes(TPU, dim, dtype).forward.rows

    def call(*arrays):
      given = "mosaic_tpu", case, arrays, case.blocks(rows)
      return cases.evaluate(*given, interpret=False)

    arrays = jax.eval_shape(lambda: case.arrays(dtype))
    self.assertEqual(devices.lowered_kernels("tpu", call, *arrays), 3)


class TablesTest(parameterized.TestCase):
  """How many pairs of a tile of rows and a tile of keys the loops visit."""

  @parameterized.parameters(
    ({}, 2 * 2 * 4 * 4, 2 * 2 * 4 * 4),
    # A tile of rows sees the keys up to its own, whole ones but for the last.
    ({"causal": True}, 2 * 2 * 10, 2 * 2 * 6),
    ({"segments": True}, 2 * 2 * 8, 2 * 2 * 8),
    ({"segments": True, "causal": True}, 2 * 2 * 6, 2 * 2 * 2),
  )
  def test_hidden_tiles_are_not_visited(self, masks, some, whole):
    case = Case(queries=64, keys=64, kv_heads=2, heads=2, share=1.0)
    segments = jnp.arange(64)[None].repeat(2, 0) // 32
    visible = Visible(
      segments=segments if "segments" in masks else None,
      causal="causal" in masks,
    )
    problem = dataclasses.replace(case.problem(), visible=visible)
    for function in (keys_of_rows, rows_of_keys):
      begin, *inner, end = jax.jit(function, static_argnums=(1, 2))(
        problem, 16, 16
      )
      self.assertEqual((end - begin).sum(), some)
      self.assertEqual((inner[1] - inner[0]).sum(), whole)


def _tpu_case(**options) -> Case:
  shape = {"queries": 70, "keys": 70, "kv_heads": 2, "scale": 0.2}
  return Case(**shape | options)


_ALL_MASKS = {"causal": True, "segments": True, "key_mask": True}
_CUTS = {
  "heads_together": Cut(16, 5, chunk=5, window=4, heads=2),
  "chunks": Cut(16, 5, chunk=2, window=3, heads=1),
  "chunks_on_two_cores": Cut(16, 5, chunk=3, window=3, heads=1, cores=2),
}


def _check_tpu(case: Case) -> None:
  """Compares results with float64, compiled anew: patches are part of them."""
  call = functools.partial(cases.evaluate, "mosaic_tpu", case, sizes=_SIZES)
  results = jax.jit(lambda *x: call(*x))(case.arrays(), case.blocks())
  cases.check(jax.block_until_ready(results), cases.reference(case))


class CutsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("heads_together", {"causal": True, "head_dim": 128, "share": 0.2}),
    ("chunks", _ALL_MASKS),
    ("chunks_on_two_cores", {"causal": True, "head_dim": 128, "queries": 40}),
  )
  @pytest.mark.integration
  def test_any_cut_gives_the_same(self, name, options):
    cut = property(lambda self: _CUTS[name])
    with mock.patch.object(tpu_plan.Plan, "cut", cut):
      _check_tpu(_tpu_case(**options))


class SimulatedTest(parameterized.TestCase):
  """Two cores, whose memory holds NaN where nothing was written."""

  @parameterized.parameters(
    (2, {"causal": True, "heads": 2, "kv_heads": 1, "batch": 1}),
    (2, {"heads": 3, "share": 0.02, "kv_heads": 3, "batch": 1}),
    (2, {"share": 0.0, "causal": True}),  # no head at all
    (2, {"queries": 16, "keys": 16, "heads": 2, "kv_heads": 1, "batch": 1}),
    (2, {"queries": 51, "keys": 51, "kv_heads": 4, **_ALL_MASKS}),
    (2, {"causal": True, "queries": 20, "keys": 37, "head_dim": 64}),
    (1, {"queries": 51, "keys": 51, **_ALL_MASKS}),
  )
  @pytest.mark.slow
  def test_equals_float64_without_races(self, cores, options):
    with devices.simulated_tpu(cores):
      _check_tpu(_tpu_case(**{"queries": 40, "keys": 40, **options}))


def _hopper(tokens=100, **options) -> Case:
  shape = {"batch": 1, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
  sizes = {"queries": tokens, "keys": tokens, "scale": 0.125}
  return Case(**shape | sizes | options)


_FORWARD, _KEYS = (128, 64), (64, 128)  # rows and keys of tiles
_HOPPER_CASES = {
  "bidirectional": (_hopper(150), _FORWARD, _KEYS),
  "causal": (_hopper(causal=True, kv_heads=1, batch=2), _FORWARD, _KEYS),
  "masks": (
    _hopper(
      causal=True, segments=True, key_mask=True, batch=2, dtype="float16"
    ), _FORWARD, _KEYS,
  ),
  "one_consumer": (_hopper(128, segments=True, scale=0.3), (64, 64), _KEYS),
  "large_head": (_hopper(head_dim=256, causal=True), _FORWARD, (64, 64)),
  "head_dim_96": (_hopper(64, head_dim=96, kv_heads=4), _FORWARD, _KEYS),
}  # fmt: skip


def _check_hopper(name: str, **changes) -> None:
  case, forward, keys = _HOPPER_CASES[name]
  case = dataclasses.replace(case, **changes)
  sizes = BlockSizes.of(forward, forward, keys)
  call = functools.partial(cases.evaluate, "mosaic_gpu", case, sizes=sizes)
  got = jax.jit(lambda *x: call(*x))(case.arrays(), case.blocks(forward[0]))
  chex.assert_type(got, case.dtype)
  cases.check(got, cases.reference(case), 2e-2, 2e-2)


class HopperTest(parameterized.TestCase):
  # The interpreter takes 10 to 20 s for each.
  @parameterized.parameters("causal", "masks")
  @pytest.mark.integration
  def test_equals_float64(self, name):
    _check_hopper(name)

  @parameterized.parameters(*sorted(_HOPPER_CASES))
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
      _check_hopper(name, queries=128, keys=128)
