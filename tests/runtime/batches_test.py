"""The mesh: rows of processes, slices, axes that split nothing."""

import types
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.runtime import mesh as mesh_lib
from moh_jax.runtime.batches import (
  batch_rows,
  local_rows,
  pad_to_shards,
  shard_batch,
)
from moh_jax.runtime.mesh import AXES, batch_shards, make_mesh

# Process of each device in the order that JAX gives for mesh.data=-1.
_V5E_4X4 = (0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0)


def _mesh(processes, **sizes):
  """A mesh whose devices know only their process."""
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  devices = np.array(
    [types.SimpleNamespace(process_index=p) for p in processes]
  ).reshape(shape)
  return types.SimpleNamespace(
    devices=devices, shape=dict(zip(AXES, shape, strict=True))
  )


def assemble(mesh, size):
  """Global rows on each shard's devices, from what their processes read."""
  shards = batch_shards(mesh)
  each = size // shards
  out = []
  for shard, devices in enumerate(mesh.devices.reshape(shards, -1)):
    index = (slice(shard * each, (shard + 1) * each),)
    for device in devices:
      rows = batch_rows(mesh, size, device.process_index)
      part = rows[local_rows(rows, index)]
      np.testing.assert_array_equal(part, np.arange(size)[index])
    out.append(part)
  return np.concatenate(out)


class BatchRowsTest(parameterized.TestCase):
  def test_rows_of_a_process_need_not_follow_each_other(self):
    mesh = _mesh(_V5E_4X4, data=16)
    rows = [batch_rows(mesh, 32, p).tolist() for p in range(4)]
    self.assertEqual(rows[0], [0, 1, 2, 3, 12, 13, 30, 31])
    self.assertCountEqual(np.concatenate(rows), range(32))

  def test_global_batch_is_in_order(self):
    orders = np.random.RandomState(0)
    for axes in (
      {"data": 16},
      {"data": 4, "fsdp": 4},
      {"data": 2, "tensor": 8},
      {"tensor": 4, "sequence": 4},
    ):
      for order in (_V5E_4X4, *(orders.permutation(_V5E_4X4) for _ in "abc")):
        found = assemble(_mesh(order, **axes), 48)
        np.testing.assert_array_equal(found, np.arange(48))

  @parameterized.parameters((8, 8), (9, 12), (1, 4))
  def test_the_last_example_fills_up(self, size, padded):
    images = np.arange(size * 6).reshape(size, 2, 3)
    found = pad_to_shards(images, _mesh(range(4), data=4))
    np.testing.assert_array_equal(found[:size], images)
    last = np.broadcast_to(images[-1], (padded - size, 2, 3))
    np.testing.assert_array_equal(found[size:], last)

  def test_shard_batch_places_every_row(self):
    devices = np.random.RandomState(1).permutation(np.array(jax.devices()))
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), list(devices))
    batch = {"x": np.arange(24.0).reshape(12, 2)}
    out = shard_batch(batch, mesh)["x"]
    np.testing.assert_array_equal(out, batch["x"])
    self.assertEqual(out.sharding.shard_shape(out.shape), (3, 2))


_FIRST = (0, 3, 4, 5)


def two_slices(first=_FIRST):
  """Patch: the devices with these ids are slice 0, the others slice 1."""
  return mock.patch.object(
    mesh_lib, "_slice_of", lambda device: int(device.id not in first)
  )


class SlicesTest(parameterized.TestCase):
  @parameterized.parameters({}, {"fsdp": 2, "tensor": 2}, {"sequence": 4})
  def test_only_the_data_axis_crosses_slices(self, **axes):
    with two_slices():
      mesh = make_mesh(MeshConfig(dcn_data=2, **axes))
    half = mesh.devices.shape[0] // 2
    self.assertGreater(half, 0)
    for part, ids in ((mesh.devices[:half], _FIRST), (mesh.devices[half:], ())):
      for device in part.flat:
        self.assertEqual(device.id in _FIRST, bool(ids))

  @parameterized.parameters(
    ({}, "mesh.dcn_data=1 must be 2: the 8 devices are of 2 slice"),
    ({"dcn_data": 2, "tensor": 8}, "must divide the 4 devices of a slice"),
    ({"dcn_data": 2, "data": 8}, "needs 8 devices, there are 4 devices of a"),
    ({"dcn_data": 2}, r"of equal size, .* \[3, 5\]", (0, 1, 2)),
    ({"dcn_data": 2}, "dcn_data=2 must be 1", range(8)),
    ({"data": -1, "tensor": 3}, "must divide the 8 devices", range(8)),
    ({"data": 16}, "needs 16 devices", range(8)),
  )
  def test_what_does_not_fit_is_refused(self, axes, message, first=_FIRST):
    with two_slices(first), self.assertRaisesRegex(ValueError, message):
      make_mesh(MeshConfig(**axes))
