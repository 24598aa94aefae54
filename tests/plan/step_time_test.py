"""Predicted times: what is computed again, sequences, slices."""

import dataclasses
import functools

from absl.testing import absltest, parameterized

from moh_jax.config import without_router
from moh_jax.layers.stack import REMAT_NAMES
from moh_jax.plan.collectives import Collective
from moh_jax.plan.estimate import Estimator
from moh_jax.plan.plan import make_plan
from moh_jax.plan.step_time import (
  assumptions,
  expected_collectives,
  seconds,
)
from moh_jax.runtime import topology
from tests.training import tiny

_MESH = {"data": -1, "max_imbalance": 2.0}


@functools.cache
def _time(remat):
  run = tiny.llm_config(model={"remat": remat}, mesh=_MESH)
  return Estimator(run, topology.parse("v5e-4")).estimate(run).time


class RematTest(parameterized.TestCase):
  @parameterized.parameters(*REMAT_NAMES)
  def test_products_that_run_again_take_time(self, remat):
    ratio = _time(remat).products / _time("none").products
    if remat == "full":
      self.assertAlmostEqual(ratio, 4 / 3)
    elif remat == "attention":
      self.assertBetween(ratio, 1.1, 4 / 3 - 1e-3)
    else:
      self.assertEqual(ratio, 1)

  @parameterized.parameters(*REMAT_NAMES)
  def test_results_that_are_made_again_are_added_up_again(self, remat):
    run = tiny.llm_config(model={"remat": remat}, mesh=_MESH)
    sizes = {"data": 1, "fsdp": 1, "tensor": 2, "sequence": 1}
    (one,) = expected_collectives(run, sizes, 1000)
    passes = 3 if remat in ("full", "attention") else 2
    self.assertEqual(one.count, 2 * passes * 2)


class FormTest(parameterized.TestCase):
  @parameterized.parameters(16, 2048)
  def test_heads_that_are_computed_take_time(self, length):
    # 16 tokens are too few to leave heads out on any device.
    run = tiny.llm_config(mesh=_MESH, model={"max_length": length})
    data = dataclasses.replace(run.data, sequence_length=length)
    run = dataclasses.replace(run, data=data)
    baseline = dataclasses.replace(run, model=without_router(run.model))
    moh, mha = (
      Estimator(one, topology.parse("v5p-8")).estimate(one)
      for one in (run, baseline)
    )
    comparison = self.assertGreater if length == 16 else self.assertLess
    comparison(moh.time.products, mha.time.products)
    self.assertEqual(moh.forms[0].heads, 1 if length == 16 else 0.75)


class SequenceTest(absltest.TestCase):
  def test_tokens_are_exchanged_for_heads(self):
    run = tiny.llm_config(mesh=_MESH)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 2}
    found = expected_collectives(run, sizes, 1000)
    by_kind = {one.kind: one for one in found if one.axes == ("sequence",)}
    self.assertCountEqual(by_kind, ["all-reduce", "all-to-all"])
    exchanged = by_kind["all-to-all"]
    # In two layers, both passes: 4 heads of queries and of results, 2 of keys
    # and of values, of 8 dims, for 8 examples of 16 / 2 tokens.
    self.assertEqual(exchanged.bytes, 2 * 2 * (4 + 4 + 2 + 2) * 8 * 8 * 8 * 4)


class SlicesTest(parameterized.TestCase):
  def test_what_crosses_slices_is_slower(self):
    one = topology.parse("v5e:2x4")
    two = dataclasses.replace(topology.parse("v5e:2x2"), slices=2)
    self.assertEqual((two.devices, two.hosts), (8, 2))
    along = {
      axis: Collective("all-reduce", "f32", (axis,), devices, 1, 1e6)
      for axis, devices in (("data", (0, 4)), ("fsdp", (0, 1, 2, 3)))
    }
    fsdp, data = along["fsdp"], along["data"]
    self.assertEqual(seconds(fsdp, one), seconds(fsdp, two))
    self.assertGreater(seconds(data, two), 10 * seconds(data, one))

  @parameterized.parameters(
    ("v5e:2x2", 1, ""), ("v5e:2x2", 2, ", 3.1 GB/s to other slices"),
    ("h100:16", 1, ", 50 GB/s to other hosts"),
  )  # fmt: skip
  def test_the_network_that_is_crossed_is_told(self, name, slices, network):
    devices = dataclasses.replace(topology.parse(name), slices=slices)
    told = assumptions(tiny.llm_config(mesh=_MESH), devices, False)
    self.assertRegex(told[2], rf"GB/s per device{network} \(the share")

  def test_a_plan_has_as_many_slices_as_the_config(self):
    run = tiny.llm_config(mesh={**_MESH, "dcn_data": 2, "fsdp": 2})
    plan = make_plan(run, topology.parse("v5e:2x2"), False)
    self.assertEqual(plan.topology.devices, 8)
    self.assertEqual(plan.run.estimate.mesh["data"], 4)
    self.assertTrue(plan.fits)


if __name__ == "__main__":
  absltest.main()
