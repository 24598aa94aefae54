"""Every optimizer over a mesh of fake devices equals one device."""

import functools

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
from moh_jax.training import saving
from moh_jax.training.step import TrainState, make_program
from tests.training import tiny
from tests.training.tiny import make_task

OPTIMIZERS = choices(OptimConfig, "name")

_STEPS = 5
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


def _run(config: Config, steps: int = _STEPS) -> tuple[TrainState, list[float]]:
  """The state and the losses after some steps."""
  devices = jax.devices()[: 1 if config.mesh.data == 1 else None]
  if config.mesh.fsdp > 1:
    devices = jax.devices()
  mesh, losses = sharding.make_mesh(config.mesh, devices), []
  task = make_task(config)
  with sharding.use_mesh(mesh):
    program = make_program(config, task, mesh)
    state, batches = program.init(), task.batches(mesh)
    for _ in range(steps):
      batch = sharding.shard_batch(next(batches), mesh)
      state, metrics = program.step(state, batch)
      losses.append(float(metrics["loss"]))
  return state, losses


def _check_losses(family: str, name: str, meshes: list[dict]) -> None:
  _, one = _run(_config(family, name, _ONE))
  assert len(set(one)) == _STEPS
  for mesh in meshes:
    _, losses = _run(_config(family, name, mesh))
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
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    folder = self.create_tempdir().full_path
    task = make_task(config)
    with sharding.use_mesh(mesh):
      program = make_program(config, task, mesh)
      batches = task.batches(mesh)
      state, _ = program.step(
        program.init(), sharding.shard_batch(next(batches), mesh)
      )
      metadata = saving.Metadata(config)
      with saving.Saver(folder, metadata, {}) as saver:
        saver.save(state, batches.position)
        saver.wait()
      restored, _ = saving.restore(folder, 1, program.state)
      chex.assert_trees_all_equal(
        jax.device_get(restored), jax.device_get(state)
      )
      batch = sharding.shard_batch(next(batches), mesh)
      after = [
        jax.device_get(program.step(s, batch)) for s in (state, restored)
      ]
    chex.assert_trees_all_equal(*after)
