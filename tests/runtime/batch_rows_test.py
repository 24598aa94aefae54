"""Which rows of a batch a process reads, for any order of the devices."""

import types

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import MeshConfig
from moh_jax.runtime import sharding
from moh_jax.training.step import make_program
from tests.training import tiny

_AXES = sharding.AXES
# Process of each device in the order that JAX gives for mesh.data=-1.
_V5E_4X4 = (0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0)


def _mesh(processes, **sizes):
  """A mesh whose devices know only their process."""
  shape = tuple(sizes.get(axis, 1) for axis in _AXES)
  devices = np.array(
    [types.SimpleNamespace(process_index=p) for p in processes]
  ).reshape(shape)
  return types.SimpleNamespace(
    devices=devices, shape=dict(zip(_AXES, shape, strict=True))
  )


def assemble(mesh, size):
  """Global rows on each shard's devices, from what their processes read."""
  shards = sharding.batch_shards(mesh)
  each = size // shards
  out = []
  for shard, devices in enumerate(mesh.devices.reshape(shards, -1)):
    index = (slice(shard * each, (shard + 1) * each),)
    parts = []
    for device in devices:
      rows = sharding.batch_rows(mesh, size, device.process_index)
      parts.append(rows[sharding.local_rows(rows, index)])
    for part in parts:
      np.testing.assert_array_equal(part, parts[0])
    out.append(parts[0])
  return np.concatenate(out)


class BatchRowsTest(parameterized.TestCase):
  def test_rows_of_a_process_need_not_follow_each_other(self):
    mesh = _mesh(_V5E_4X4, data=16)
    rows = [sharding.batch_rows(mesh, 32, p).tolist() for p in range(4)]
    self.assertEqual(rows[0], [0, 1, 2, 3, 12, 13, 30, 31])
    self.assertCountEqual(np.concatenate(rows), range(32))

  @parameterized.parameters(
    ({"data": 16},),
    ({"data": 4, "fsdp": 4},),
    ({"fsdp": 8, "tensor": 2},),
    ({"data": 2, "tensor": 8},),
    ({"tensor": 4, "sequence": 4},),
  )
  def test_global_batch_is_in_order(self, axes):
    orders = np.random.RandomState(0)
    for processes in (_V5E_4X4, *(orders.permutation(_V5E_4X4) for _ in "abc")):
      mesh = _mesh(processes, **axes)
      np.testing.assert_array_equal(assemble(mesh, 48), np.arange(48))

  def test_shard_batch_places_every_row(self):
    devices = np.random.RandomState(1).permutation(np.array(jax.devices()))
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), list(devices))
    batch = {"x": np.arange(24.0).reshape(12, 2)}
    out = sharding.shard_batch(batch, mesh)["x"]
    np.testing.assert_array_equal(out, batch["x"])
    self.assertEqual(out.sharding.shard_shape(out.shape), (3, 2))


@pytest.mark.slow
class DeviceOrderTest(absltest.TestCase):
  def test_losses_do_not_depend_on_the_order_of_devices(self):
    config = tiny.dit_config(
      model=tiny.ALIKE["dit"], mesh={"data": 4, "fsdp": 2}
    )
    losses = [_losses(config, order) for order in (range(8), _ORDER)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    self.assertNotAlmostEqual(losses[0][0], losses[0][1])


_ORDER = (0, 1, 6, 7, 2, 5, 4, 3)


def _losses(config, order):
  """Losses of a run by four processes of two devices each, in an order."""
  devices = [jax.devices()[i] for i in order]
  mesh = sharding.make_mesh(config.mesh, devices)
  task = tiny.make_task(config)
  size = config.data.batch_size
  # What process p reads, as process 0 of a mesh that calls it so.
  streams, rows = {}, {}
  for process in range(4):
    mine = [device.id // 2 != process for device in mesh.devices.flat]
    stand_in = _mesh(mine, **mesh.shape)
    streams[process] = task.batches(stand_in)
    rows[process] = sharding.batch_rows(stand_in, size)
  split = jax.NamedSharding(mesh, jax.P(sharding.BATCH_AXES))

  def place(parts):
    arrays = []
    shape = (size, *parts[0].shape[1:])
    for device, index in split.addressable_devices_indices_map(shape).items():
      process = device.id // 2
      part = parts[process][sharding.local_rows(rows[process], index)]
      arrays.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, split, arrays)

  program = make_program(config, task, mesh)
  losses = []
  with sharding.use_mesh(mesh):
    state = program.init()
    for _ in range(3):
      parts = [next(streams[process]) for process in range(4)]
      batch = jax.tree.map(lambda *x: place(x), *parts)
      state, metrics = program.step(state, batch)
      losses.append(float(metrics["loss"]))
  return losses


if __name__ == "__main__":
  absltest.main()
