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


def _config(family, mesh=None, **sections):
  """A run of some microbatches; of images that are dropped and mixed."""
  sections = {"optim": {"accumulation": 2}, **sections}
  if family == "vit":
    sections["model"] = {"drop_path": 0.3}
    sections["classifier"] = {"mixup": 0.2, "cutmix": 0.5}
  return meshes.config_of(family, mesh=mesh, **sections)


def _params_bytes(config):
  program = make_program(config, tiny.make_task(config), meshes.mesh_of(config))
  return sum(x.size * 4 for x in jax.tree.leaves(program.state.params))


class LossesTest(parameterized.TestCase):
  @parameterized.parameters(
    ("llm", {"data": 2, "fsdp": 2, "tensor": 2, "gather": "step"}),
    ("dit", {"data": 2, "fsdp": 2}),
    ("vit", {"data": 2, "fsdp": 2, "gather": "step"}),
  )
  @pytest.mark.integration
  def test_random_choices_and_losses_are_those_of_one_device(self, name, mesh):
    data = {"batch_size": 16}
    ours = meshes.losses(_config(name, mesh, data=data))
    theirs = meshes.losses(_config(name, data=data))
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
    config = _config(
      "llm",
      mesh,
      data={"batch_size": 8 * _MICROBATCHES},
      optim={"accumulation": _MICROBATCHES},
    )
    text, devices = meshes.compiled_step(config)
    return config, read_collectives(text, dict(devices.shape))

  @pytest.mark.integration
  def test_of_replicas_is_one_of_gradients_and_one_a_microbatch(self):
    config, found = self._collectives({"data": 8})
    self.assertEqual({one.kind for one in found}, {"all-reduce"})
    # One of the routers' sums for each microbatch, and the gradients' few.
    self.assertLessEqual(sum(one.count for one in found), _MICROBATCHES + 3)
    total = sum(one.bytes for one in found)
    self.assertLess(total, 1.01 * _params_bytes(config))

  @pytest.mark.integration
  def test_of_split_parameters_gathers_and_scatters_each_once(self):
    config, found = self._collectives({"fsdp": 8, "gather": "step"})
    size = _params_bytes(config)
    total = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    count = dict(total)
    for one in found:
      total[one.kind] += one.bytes
      count[one.kind] += one.count
    self.assertBetween(total["all-gather"], 0.95 * size, size)
    self.assertEqual(total["all-gather"], total["reduce-scatter"])
    self.assertLess(total["all-reduce"], 0.05 * size)
    self.assertLessEqual(count["all-reduce"], _MICROBATCHES + 3)

  @parameterized.parameters("float32", "bfloat16")
  @pytest.mark.integration
  def test_has_the_dtype_of_the_config(self, exchange):
    config = _config("llm", {"data": 2, "fsdp": 2, "exchange": exchange})
    mesh, task = meshes.mesh_of(config), tiny.make_task(config)
    program = make_program(config, task, mesh)
    with use_mesh(mesh):
      jaxpr = jax.make_jaxpr(program.step)(program.state, program.batch)
    sizes = {"float32": 0, "bfloat16": 0}
    for axes, sent in _sums(jaxpr.jaxpr):
      if math.prod(mesh.shape[axis] for axis in axes) > 1:
        sizes[sent.dtype.name] += sent.size
    self.assertGreater(sizes.pop(exchange), 10 * max(sizes.values()))
