"""Gradients are exchanged once a step, and are those of one device."""

import math

import jax
import jax.extend.core
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.runtime.mesh import use_mesh
from moh_jax.training.step import make_program
from tests.compiles.programs import read_collectives
from tests.training import meshes, tiny

_MICROBATCHES = 4
# Images are dropped and mixed, labels and noise are sampled.
_RANDOM = {
  "vit": {
    "model": {**tiny.ALIKE["vit"], "drop_path": 0.3},
    "classifier": {"mixup": 0.2, "cutmix": 0.5},
  },
  "dit": {"model": tiny.ALIKE["dit"]},
}


class LossesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("dit", {"data": 2, "fsdp": 2}),
    ("vit", {"data": 2, "fsdp": 2, "gather": "step"}),
  )
  @pytest.mark.integration
  def test_random_choices_and_losses_are_those_of_one_device(self, name, mesh):
    ours, theirs = (
      meshes.losses(
        tiny.CONFIGS[name](
          mesh={"data": 1, **axes}, optim={"accumulation": 2}, **_RANDOM[name]
        ),
        steps=2,
      )
      for axes in (mesh, {})
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def _sums(jaxpr):
  """Axes and values of the sums over devices."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name.startswith("psum"):
      yield from ((eqn.params["axes"], x.aval) for x in eqn.invars)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _sums(inner)


class ExchangeTest(parameterized.TestCase):
  def _collectives(self, mesh):
    """Bytes and number of each kind, and the bytes of the parameters."""
    config = meshes.config_of(
      "llm",
      mesh=mesh,
      data={"batch_size": 8 * _MICROBATCHES},
      optim={"accumulation": _MICROBATCHES},
    )
    text, devices = meshes.compiled_step(config)
    sizes, counts = {}, {}
    for one in read_collectives(text, dict(devices.shape)):
      sizes[one.kind] = sizes.get(one.kind, 0) + one.bytes
      counts[one.kind] = counts.get(one.kind, 0) + one.count
    params = jax.tree.leaves(tiny.random_params(config))
    return sizes, counts, sum(x.nbytes for x in params)

  @pytest.mark.integration
  def test_of_replicas_is_one_of_gradients_and_one_a_microbatch(self):
    sizes, counts, params = self._collectives({"data": 8})
    self.assertEqual([*sizes], ["all-reduce"])
    # One of the routers' sums for each microbatch, and the gradients' few.
    self.assertLessEqual(counts["all-reduce"], _MICROBATCHES + 3)
    self.assertLess(sizes["all-reduce"], 1.01 * params)

  @pytest.mark.integration
  def test_of_split_parameters_gathers_and_scatters_each_once(self):
    sizes, counts, params = self._collectives({"fsdp": 8, "gather": "step"})
    self.assertBetween(sizes["all-gather"], 0.95 * params, params)
    self.assertEqual(sizes["all-gather"], sizes["reduce-scatter"])
    self.assertLess(sizes["all-reduce"], 0.05 * params)
    self.assertLessEqual(counts["all-reduce"], _MICROBATCHES + 3)

  def test_has_the_dtype_of_the_config(self):
    config = tiny.llm_config(
      mesh={"data": 2, "fsdp": 2, "exchange": "bfloat16"}
    )
    mesh, task = meshes.mesh_of(config), tiny.make_task(config)
    program = make_program(config, task, mesh)
    with use_mesh(mesh):
      jaxpr = jax.make_jaxpr(program.step)(program.state, program.batch)
    sizes = {"float32": 0, "bfloat16": 0}
    for axes, sent in _sums(jaxpr.jaxpr):
      if math.prod(mesh.shape[axis] for axis in axes) > 1:
        sizes[sent.dtype.name] += sent.size
    self.assertGreater(sizes["bfloat16"], 10 * sizes["float32"])
