"""How the TPU kernels visit rows and keys, and that no cut changes results."""

import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels import tpu_plan
from moh_jax.ops.kernels.attention import block_sizes
from moh_jax.ops.kernels.problem import BlockSizes
from moh_jax.ops.kernels.tpu_plan import Cut
from tests.ops import cases, devices
from tests.ops.cases import Case

_ROWS = 16
_SIZES = BlockSizes.of(*[(_ROWS, 16)] * 3)


def _case(**options) -> Case:
  shape = {"queries": 70, "keys": 70, "kv_heads": 2, "scale": 0.2}
  return Case(**shape | options)


_MASKS = {
  "everything": {},
  "causal": {"causal": True},
  "fewer_queries": {"causal": True, "queries": 40},
  "segments": {"segments": True},
  "packed_texts": {"causal": True, "segments": True},
  "all_masks": {"causal": True, "segments": True, "key_mask": True},
}
_CUTS = {
  "heads_together": Cut(16, 5, chunk=5, window=4, heads=2),
  "chunks": Cut(16, 5, chunk=2, window=3, heads=1),
  "two_cores": Cut(16, 5, chunk=5, window=2, heads=1, cores=2),
  "chunks_on_two_cores": Cut(16, 5, chunk=3, window=3, heads=1, cores=2),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _tables(case, cut, keys_first):
  return tpu_plan.tables(case.problem(), cut, keys_first=keys_first)


def _visits(lists: tpu_plan.Tables) -> list[list[dict[str, int]]]:
  """The visits of every core, one after another."""
  names = "window", "unit", "chunk", "low", "high"
  columns = [np.asarray(getattr(lists, name)) for name in names]
  visits = [dict(zip(names, map(int, x))) for x in zip(*columns)]
  first = np.asarray(lists.first)
  return [visits[a:b] for a, b in itertools.pairwise(first)]


class VisitsTest(parameterized.TestCase):
  @parameterized.product(
    options=(
      {"share": 0.0},
      {"share": 0.01, "heads": 2},  # a pair or two
      {"heads": 2, "kv_heads": 1, "batch": 1, "causal": True},
      _MASKS["all_masks"],
    ),
    keys_first=(False, True),
  )
  def test_every_core_has_a_visit_to_what_no_other_one_writes(
    self, options, keys_first
  ):
    case, cut = _case(**options), Cut(16, 5, 2, 2, heads=1, cores=2)
    lists, _ = _tables(case, cut, keys_first)
    names = ("unit", "chunk") if keys_first else ("window",)
    written = [{tuple(x[n] for n in names) for x in c} for c in _visits(lists)]
    self.assertLen(written, 2)
    self.assertTrue(all(written))
    self.assertLen(set().union(*written), sum(map(len, written)))
    runs = [
      place
      for core in _visits(lists)
      for place, _ in itertools.groupby(
        tuple(x[n] for n in names) for x in core
      )
    ]
    self.assertLen(set(runs), len(runs))  # no place is left and taken again

  def test_keys_are_fetched_once_and_never_for_unused_blocks(self):
    case = _case(queries=16, keys=64, kv_heads=4)
    mask = np.zeros((2, 16, 4), bool)
    mask[0, :, 1] = mask[1, :, 2] = True
    table = head_blocks(ActiveHeads(jnp.asarray(mask), 4), _ROWS)
    problem = dataclasses.replace(case.problem(), blocks=table)
    plan = tpu_plan.Plan(problem, 16, keys_first=False)
    lists, _ = jax.jit(
      lambda: tpu_plan.tables(problem, plan.cut, keys_first=False)
    )()
    index = plan.keys_or_values(jnp.zeros(problem.k_shape)).spec.index_map
    places = [
      tuple(map(int, index(0, step, *lists)))
      for step in range(int(lists.first[-1]))
    ]
    fetched = [place for place, _ in itertools.groupby(places)]
    self.assertLen(set(fetched), len(fetched))
    self.assertEqual({place[0] for place in fetched}, {1, 6})


class PlanTest(parameterized.TestCase):
  """Sizes for real devices; nothing is computed."""

  @parameterized.product(causal=(False, True), keys_first=(False, True))
  def test_two_cores_share_the_work_of_one_head(self, causal, keys_first):
    # LLaMA-8B on tensor=8.
    case = Case(1, 4096, 4096, 4, 1, 128, causal)
    with devices.traced_for("tpu", "TPU v5"):
      tile = block_sizes("mosaic_tpu", 128, "bfloat16").dkv
      problem = case.problem(256)
      plan = tpu_plan.Plan(problem, tile.keys, keys_first=keys_first)
      cut = plan.cut
      lists, _ = jax.jit(
        lambda: tpu_plan.tables(problem, cut, keys_first=keys_first)
      )()
    done = []
    for core in _visits(lists):
      tiles = 0
      for visit in core:
        begin = visit["chunk"] * cut.chunk
        for i in range(visit["low"], visit["high"]):
          start, _, end = (
            x[visit["window"] * cut.window + i] for x in lists[-3:]
          )
          tiles += max(0, min(end, begin + cut.chunk) - max(start, begin))
      done.append(int(tiles))
    self.assertLen(done, 2)
    self.assertGreater(min(done), 0.3 * sum(done))


def _check(case: Case) -> None:
  """Compares results with float64, compiled anew: patches are part of them."""
  call = functools.partial(cases.evaluate, "mosaic_tpu", case, sizes=_SIZES)
  results = jax.jit(lambda *x: call(*x))(case.arrays(), case.blocks())
  cases.check(jax.block_until_ready(results), cases.reference(case))


class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(
    ("heads_together", {"causal": True, "head_dim": 128, "share": 0.2}),
    ("chunks", _MASKS["all_masks"]),
    ("chunks_on_two_cores", {"causal": True, "head_dim": 128, "queries": 40}),
  )
  def test_any_cut_gives_the_same(self, name, options):
    cut = property(lambda self: _CUTS[name])
    with mock.patch.object(tpu_plan.Plan, "cut", cut):
      _check(_case(**options))


class SimulatedTest(parameterized.TestCase):
  """Two cores, whose memory holds NaN where nothing was written."""

  @parameterized.parameters(
    (2, {"causal": True, "heads": 2, "kv_heads": 1, "batch": 1}),
    (2, {"heads": 3, "share": 0.02, "kv_heads": 3, "batch": 1}),
    (2, {"share": 0.0, "causal": True}),  # no head at all
    (2, {"queries": 16, "keys": 16, "heads": 2, "kv_heads": 1, "batch": 1}),
    (2, {"queries": 51, "keys": 51, "kv_heads": 4, **_MASKS["all_masks"]}),
    (2, {"causal": True, "queries": 20, "keys": 37, "head_dim": 64}),
    (1, {"queries": 51, "keys": 51, **_MASKS["all_masks"]}),
  )
  @pytest.mark.slow
  def test_equals_float64_without_races(self, cores, options):
    with devices.simulated_tpu(cores):
      _check(_case(**{"queries": 40, "keys": 40, **options}))
