"""Runs on meshes of fake devices: equal to one device; what they exchange.

Each mesh of `meshes.MESHES` for each family takes minutes: `pytest -m slow`.
One of them is compiled in the ordinary suite.
"""

import collections
import functools
import json
import math
import shutil

import chex
import jax
import jax.extend.core
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from moh_jax.config import MeshConfig
from moh_jax.config.base import choices
from moh_jax.config.run import OptimConfig
from moh_jax.inference.restore import restore
from moh_jax.models.registry import released_model
from moh_jax.ops import placement
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training.step import make_program
from moh_jax.training.train import train
from tests import folders
from tests.compiles.programs import read_collectives
from tests.training import meshes, tiny
from tests.training.tiny import make_task

_MICROBATCHES = 4
# Images are dropped and mixed, labels and noise are sampled.
_RANDOM = {
  "vit": {
    "model": {**tiny.ALIKE["vit"], "drop_path": 0.3},
    "classifier": {"mixup": 0.2, "cutmix": 0.5},
  },
  "dit": {"model": tiny.ALIKE["dit"]},
}


class RunTest(folders.FolderTest):
  @pytest.mark.integration
  def test_figures_are_those_of_one_device_and_checkpoints_go_to_and_fro(self):
    config, folder = tiny.llm_config(mesh=tiny.MESH), self.root / "mesh"
    one = tiny.train(tiny.llm_config(), self.root / "one")
    run = train(config, str(folder))
    losses = [tiny.losses(self.root / name) for name in ("mesh", "one")]
    self.assertLen(losses[0], 4)
    np.testing.assert_allclose(*losses, rtol=2e-5)
    chex.assert_trees_all_close(run.evaluation, one.evaluation, rtol=1e-4)
    restored = restore(str(folder)).params
    for leaf in jax.tree.leaves(restored):
      self.assertLen(leaf.sharding.device_set, 1)
    chex.assert_trees_all_equal(*jax.device_get((restored, run.state.ema)))
    longer = tiny.changed(config, train={"steps": 5})
    resumed = train(longer, shutil.copytree(self.root / "one", f"{folder}2"))
    self.assertEqual(int(resumed.state.step), 5)
    self.assertLen(resumed.state.step.sharding.device_set, 8)


class ChecksTest(absltest.TestCase):
  def test_heads_must_fit_the_tensor_axis(self):
    check, eight = placement.check_heads, make_mesh(MeshConfig(tensor=8))
    check(released_model("moh-llama3-8b"), eight)
    for name in ("moh-llm-s-75", "moh-vit-s80"):  # of 12 and of 3 heads
      message = r"mesh.tensor=8 must divide the \d+ key/value heads of group 1"
      with self.assertRaisesRegex(ValueError, message):
        check(released_model(name), eight)


def _config(name, mesh, **sections):
  optim = {"name": name, "lr": 3e-4, "warmup_steps": 1}
  return meshes.config_of(mesh=mesh, optim=optim, **sections)


class LossesTest(parameterized.TestCase):
  """The first steps are those of one device."""

  def _check(self, one, *others, steps=3, rtol=1e-5):
    losses = meshes.losses(one, steps)
    self.assertLen(set(losses), len(losses))
    for other in others:
      np.testing.assert_allclose(meshes.losses(other, steps), losses, rtol=rtol)

  @pytest.mark.integration
  def test_of_an_optimizer(self):
    self._check(*(_config("muon", mesh) for mesh in ({}, tiny.MESH)))

  @parameterized.parameters(
    ("llm", {**tiny.MESH, "gather": "step"}),
    ("dit", {"data": 2, "fsdp": 2}),
    ("vit", {"data": 2, "fsdp": 2, "gather": "step"}),
  )
  @pytest.mark.integration
  def test_of_random_choices(self, family, mesh):
    optim = {"accumulation": 2}
    one = tiny.CONFIGS[family](optim=optim, **_RANDOM.get(family, {}))
    self._check(one, tiny.changed(one, mesh=mesh), steps=2, rtol=2e-6)

  @parameterized.product(family=tuple(meshes.MODELS), form=("dense", "packed"))
  @pytest.mark.slow
  def test_of_every_mesh(self, family, form):
    if family == "vit" and form == "packed":
      self.skipTest("ViT's forms compute every head")
    others = (
      meshes.config_of(family, form, mesh=mesh)
      for mesh in meshes.MESHES.values()
    )
    self._check(meshes.config_of(family), *others)


class StateShardingTest(parameterized.TestCase):
  @staticmethod
  @functools.cache
  def _abstract(name):
    config = _config(name, tiny.MESH, model={"mlp_dim": meshes.WIDTH})
    mesh = meshes.mesh_of(config)
    with use_mesh(mesh):
      return make_program(config, make_task(config), mesh).state

  @parameterized.parameters(*choices(OptimConfig, "name"))
  def test_moments_are_split_as_their_parameters(self, name):
    state = self._abstract(name)
    kernel = state.params["blocks0"]["mlp"]["up"]["kernel"]
    self.assertEqual(kernel.sharding.spec, P(None, ("fsdp",), ("tensor",)))
    specs = {
      leaf.sharding.spec
      for leaf in jax.tree.leaves(state.opt_state)
      if leaf.shape == kernel.shape
    }
    # The down projection has the same shape and the other axes.
    self.assertIn(kernel.sharding.spec, specs)
    self.assertNotIn(P(), specs)

  def test_means_over_rows_and_columns_lose_one_dimension(self):
    second = self._abstract("adafactor").opt_state[1][0][0]
    row, column = (
      tree["embed"]["embedding"] for tree in (second.v_row, second.v_col)
    )
    width, vocab = meshes.WIDTH, meshes.VOCAB
    self.assertEqual((row.shape, column.shape), ((width,), (vocab,)))
    self.assertEqual(row.sharding.spec, P(None))
    self.assertEqual(column.sharding.spec, P(("tensor", "fsdp")))
    self.assertEqual(second.v["embed"]["embedding"].sharding.spec, P())
    # Of two dimensions of one size the row's means lack the last one.
    row = second.v_row["blocks0"]["mlp"]["up"]["kernel"]
    found = row.shape, row.sharding.spec
    self.assertEqual(found, ((2, width), P(None, "fsdp")))


@functools.cache
def _flops_of_one_device(family):
  return meshes.dot_flops(meshes.compiled_step(meshes.config_of(family))[0])


class CompiledTest(parameterized.TestCase):
  """Devices share the work and exchange what is expected."""

  def _check(self, family, name):
    config = meshes.config_of(family, mesh=meshes.MESHES[name])
    text, mesh = meshes.compiled_step(config)
    ratio = 8 * meshes.dot_flops(text) / _flops_of_one_device(family)
    self.assertBetween(ratio, 0.95, 1.05)
    if not meshes.GOLDEN.exists():
      self.skipTest(f"{meshes.GOLDEN.name} is not recorded")
    recorded = json.loads(meshes.GOLDEN.read_text())[f"{family} {name}"]
    hint = "if it should be so: python -m tests.tools.record_collectives"
    self.assertEqual(meshes.exchanges(text, mesh), recorded, hint)

  @pytest.mark.integration
  def test_on_one_mesh(self):
    self._check("llm", "2,4")

  @parameterized.product(family=tuple(meshes.MODELS), mesh=tuple(meshes.MESHES))
  @pytest.mark.slow
  def test_on_every_mesh(self, family, mesh):
    self._check(family, mesh)

  @pytest.mark.integration
  def test_no_device_has_the_output_layer_or_its_gradient_whole(self):
    vocab, width = meshes.VOCAB, meshes.WIDTH
    config = meshes.config_of(
      model={"tie_embeddings": True},
      mesh={"data": 2, "fsdp": 4},
      optim={"accumulation": 2},
      data={"batch_size": 16},
    )
    text, _ = meshes.compiled_step(config)
    whole = {
      shape
      for dtype in ("f32", "bf16")
      for shape in meshes.shapes(text, dtype)
      if math.prod(shape) >= vocab * width and vocab in shape
    }
    self.assertEmpty(whole)
    self.assertIn((width, vocab // 4), meshes.shapes(text))


def _sums(jaxpr):
  """Axes and values of the sums over devices."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name.startswith("psum"):
      yield from ((eqn.params["axes"], x.aval) for x in eqn.invars)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _sums(inner)


# All parameters are gathered once, and their gradients scattered once.
_SPLIT = dict.fromkeys(("all-gather", "reduce-scatter"), (0.95, 1))
_SPLIT["all-reduce"] = (0, 0.05)


class ExchangeTest(parameterized.TestCase):
  """Gradients are exchanged once a step, whatever the microbatches."""

  @parameterized.parameters(
    ({"data": 8}, {"all-reduce": (0.95, 1.01)}),
    ({"fsdp": 8, "gather": "step"}, _SPLIT),
  )
  @pytest.mark.integration
  def test_of_gradients_is_one(self, mesh, expected):
    config = meshes.config_of(
      mesh=mesh,
      data={"batch_size": 8 * _MICROBATCHES},
      optim={"accumulation": _MICROBATCHES},
    )
    text, devices = meshes.compiled_step(config)
    sizes, counts = collections.Counter(), collections.Counter()
    for one in read_collectives(text, dict(devices.shape)):
      sizes[one.kind] += one.bytes
      counts[one.kind] += one.count
    # One of the routers' sums for each microbatch, and the gradients' few.
    self.assertLessEqual(counts["all-reduce"], _MICROBATCHES + 3)
    params = sum(x.nbytes for x in jax.tree.leaves(tiny.random_params(config)))
    self.assertEqual(sizes.keys(), expected.keys())
    for kind, (low, high) in expected.items():  # how often all parameters
      self.assertBetween(sizes[kind] / params, low, high)
    self.assertEqual(sizes["all-gather"], sizes["reduce-scatter"])

  def test_has_the_dtype_of_the_config(self):
    config = tiny.llm_config(
      mesh={"data": 2, "fsdp": 2, "exchange": "bfloat16"}
    )
    mesh, task = meshes.mesh_of(config), make_task(config)
    program = make_program(config, task, mesh)
    with use_mesh(mesh):
      jaxpr = jax.make_jaxpr(program.step)(program.state, program.batch)
    sizes = {"float32": 0, "bfloat16": 0}
    for axes, sent in _sums(jaxpr.jaxpr):
      if math.prod(mesh.shape[axis] for axis in axes) > 1:
        sizes[sent.dtype.name] += sent.size
    self.assertGreater(sizes["bfloat16"], 10 * sizes["float32"])
