"""Every optimizer over a mesh of fake devices equals one device."""

import functools
import os
import shutil
from collections.abc import Sequence

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from moh_jax.config import Config
from moh_jax.config.base import choices
from moh_jax.config.run import OptimConfig
from moh_jax.runtime import sharding
from moh_jax.training.step import make_program
from tests.training import meshes, tiny
from tests.training.tiny import make_task

OPTIMIZERS = choices(OptimConfig, "name")

_ONE = {"data": 1, "max_imbalance": 2.0}
_MESHES = (
  {**_ONE, "data": 8},
  {**_ONE, "data": 2, "fsdp": 4},
  {**_ONE, "fsdp": 4, "tensor": 2},
  tiny.MESH,
)
# Sizes of at least 32, so that Adafactor has means of rows and columns.
_CONFIGS = {
  "llm": functools.partial(tiny.llm_config, model={"mlp_dim": 32}),
  "dit": functools.partial(
    tiny.dit_config, model={**tiny.ALIKE["dit"], "width": 32}
  ),
  "vit": functools.partial(
    tiny.deterministic_config,
    model={**tiny.ALIKE["vit"], "embed_dims": (32,)},
  ),
}


def _config(family: str, name: str, mesh: dict, **optim) -> Config:
  fields = {"name": name, "lr": 3e-4, "warmup_steps": 1, **optim}
  return _CONFIGS[family](optim=fields, mesh=mesh)


def _check_losses(family: str, name: str, others: Sequence[dict]) -> None:
  one = meshes.losses(_config(family, name, _ONE))
  assert len(set(one)) == len(one)
  for mesh in others:
    losses = meshes.losses(_config(family, name, mesh))
    np.testing.assert_allclose(losses, one, rtol=1e-5, err_msg=str(mesh))


class OptimizersMeshTest(parameterized.TestCase):
  @parameterized.parameters("adafactor", "muon")
  def test_losses_equal_the_single_device_ones(self, name):
    _check_losses("llm", name, [tiny.MESH])


@pytest.mark.slow
class EveryMeshTest(parameterized.TestCase):
  @parameterized.product(family=tuple(_CONFIGS), name=OPTIMIZERS)
  def test_losses_equal_the_single_device_ones(self, family, name):
    _check_losses(family, name, _MESHES)


class StateShardingTest(parameterized.TestCase):
  @staticmethod
  @functools.cache
  def _abstract(name, **optim):
    config = _config("llm", name, tiny.MESH, **optim)
    mesh = sharding.make_mesh(config.mesh)
    with sharding.use_mesh(mesh):
      return make_program(config, make_task(config), mesh).state

  @parameterized.parameters(*OPTIMIZERS)
  def test_moments_are_split_as_their_parameters(self, name):
    state = self._abstract(name)
    kernel = state.params["blocks0"]["mlp"]["up"]["kernel"]
    self.assertEqual(kernel.sharding.spec, P(None, ("fsdp",), ("tensor",)))
    moments = [
      leaf
      for leaf in jax.tree.leaves(state.opt_state)
      if leaf.shape == kernel.shape
    ]
    self.assertNotEmpty(moments)
    specs = {moment.sharding.spec for moment in moments}
    # The down projection has the same shape and the other axes.
    self.assertIn(kernel.sharding.spec, specs)
    self.assertNotIn(P(), specs)

  def test_means_over_rows_and_columns_lose_one_dimension(self):
    second = self._abstract("adafactor").opt_state[1][0][0]
    row, column = (
      tree["embed"]["embedding"] for tree in (second.v_row, second.v_col)
    )
    self.assertEqual((row.shape, column.shape), ((32,), (60,)))
    self.assertEqual(row.sharding.spec, P(None))
    self.assertEqual(column.sharding.spec, P(("tensor", "fsdp")))
    self.assertEqual(second.v["embed"]["embedding"].sharding.spec, P())

  @parameterized.parameters(*OPTIMIZERS)
  def test_first_moments_in_bfloat16_take_half_the_memory(self, name):
    def count(dtype):
      leaves = jax.tree.leaves(
        self._abstract(name, moment_dtype=dtype).opt_state
      )
      half = sum(x.size for x in leaves if x.dtype == "bfloat16")
      return half, sum(x.size * x.dtype.itemsize for x in leaves)

    params = self._abstract(name).params
    size = sum(x.size for x in jax.tree.leaves(params))
    (none, full), (half, less) = count("float32"), count("bfloat16")
    self.assertEqual((none, half, full - less), (0, size, 2 * size))

  @parameterized.parameters("muon", "adafactor")
  def test_a_saved_state_continues_exactly(self, name):
    config = _config("llm", name, _ONE, moment_dtype="bfloat16")
    folder = self.create_tempdir().full_path
    whole = tiny.train(config, folder)
    shutil.rmtree(os.path.join(folder, "checkpoints", "4"))
    again = tiny.train(config, folder)
    chex.assert_trees_all_equal(again.state, whole.state)
