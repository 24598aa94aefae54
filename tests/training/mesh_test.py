"""Runs on meshes of fake devices: equal to one device; what does not fit.

Each mesh of `meshes.MESHES` for each family takes minutes: `pytest -m slow`.
One of them is compiled in the ordinary suite.
"""

import functools
import math
import os
import shutil

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from moh_jax.config import MeshConfig, apply_overrides
from moh_jax.config.base import choices
from moh_jax.config.run import OptimConfig
from moh_jax.inference.restore import restore
from moh_jax.models.registry import released_model
from moh_jax.ops import placement
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training.step import make_program
from moh_jax.training.train import train
from tests.training import meshes, tiny
from tests.training.tiny import make_task


class RunTest(absltest.TestCase):
  """A run on one device and the same over the mesh."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.one_dir, cls.mesh_dir = (
      cls.create_tempdir(cls()).full_path for _ in range(2)
    )
    cls.one = tiny.train(tiny.llm_config(), cls.one_dir)
    cls.on_mesh = train(tiny.llm_config(mesh=tiny.MESH), cls.mesh_dir)

  @pytest.mark.integration
  def test_figures_equal_the_single_device_ones(self):
    losses = [
      [row["loss"] for row in tiny.rows(folder, "train")]
      for folder in (self.mesh_dir, self.one_dir)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    self.assertLen(losses[0], 4)
    ours, theirs = self.on_mesh.evaluation, self.one.evaluation
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4)

  @pytest.mark.integration
  def test_checkpoints_go_from_the_mesh_to_one_device_and_back(self):
    restored = restore(self.mesh_dir)
    for leaf in jax.tree.leaves(restored.params):
      self.assertLen(leaf.sharding.device_set, 1)
    state = self.on_mesh.state
    chex.assert_trees_all_equal(*jax.device_get((restored.params, state.ema)))
    config = tiny.llm_config(mesh=tiny.MESH, train={"steps": 5})
    workdir = os.path.join(self.create_tempdir().full_path, "copy")
    resumed = train(config, shutil.copytree(self.one_dir, workdir))
    self.assertEqual(int(resumed.state.step), 5)
    self.assertLen(resumed.state.step.sharding.device_set, 8)


class ChecksTest(absltest.TestCase):
  def test_heads_must_fit_the_tensor_axis(self):
    check, eight = placement.check_heads, make_mesh(MeshConfig(tensor=8))
    check(released_model("moh-llama3-8b"), eight)
    for name in ("moh-llm-s-75", "moh-vit-s80"):  # of 12 and of 3 heads
      message = r"mesh.tensor=8 must divide the \d+ key/value heads of the 1\. "
      with self.assertRaisesRegex(ValueError, message):
        check(released_model(name), eight)


def _config(name, mesh):
  optim = {"name": name, "lr": 3e-4, "warmup_steps": 1}
  return meshes.config_of("llm", mesh=mesh, optim=optim)


class LossesTest(parameterized.TestCase):
  """The first steps are those of one device."""

  def _check(self, one, *others):
    losses = meshes.losses(one)
    self.assertLen(set(losses), len(losses))
    for other in others:
      np.testing.assert_allclose(meshes.losses(other), losses, rtol=1e-5)

  @pytest.mark.integration
  def test_of_an_optimizer(self):
    self._check(*(_config("muon", mesh) for mesh in ({}, tiny.MESH)))

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
    config = _config(name, tiny.MESH)
    config = apply_overrides(config, "model", mlp_dim=meshes.WIDTH)
    mesh = make_mesh(config.mesh)
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
    self.assertEqual(
      meshes.exchanges(text, mesh),
      meshes.recorded(family, name),
      "if it should be so: python -m tests.tools.record_collectives",
    )

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
      "llm",
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
