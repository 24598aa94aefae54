"""The mesh: rows of processes, slices, what stays whole, what fits."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import MeshConfig, apply_overrides
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import abstract_params
from moh_jax.training import entrance
from tests.cli import tiny_checkpoint
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

  def test_shard_batch_places_every_row(self):
    devices = np.random.RandomState(1).permutation(np.array(jax.devices()))
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), list(devices))
    batch = {"x": np.arange(24.0).reshape(12, 2)}
    out = sharding.shard_batch(batch, mesh)["x"]
    np.testing.assert_array_equal(out, batch["x"])
    self.assertEqual(out.sharding.shard_shape(out.shape), (3, 2))


_FIRST = (0, 3, 4, 5)


def two_slices(first=_FIRST):
  """Patch: the devices with these ids are slice 0, the others slice 1."""
  return mock.patch.object(
    sharding, "_slice_of", lambda device: int(device.id not in first)
  )


class SlicesTest(parameterized.TestCase):
  @parameterized.parameters({}, {"fsdp": 2, "tensor": 2}, {"sequence": 4})
  def test_only_the_data_axis_crosses_slices(self, **axes):
    with two_slices():
      mesh = sharding.make_mesh(MeshConfig(dcn_data=2, **axes))
    half = mesh.devices.shape[0] // 2
    self.assertGreater(half, 0)
    for part, ids in ((mesh.devices[:half], _FIRST), (mesh.devices[half:], ())):
      for device in part.flat:
        self.assertEqual(device.id in _FIRST, bool(ids))

  @parameterized.parameters(
    ({}, "mesh.dcn_data=1 must be 2: the 8 devices are of 2 slice"),
    ({"dcn_data": 3}, "mesh.dcn_data=3 must be 2"),
    ({"dcn_data": 2, "tensor": 8}, "must divide the 4 devices of a slice"),
    ({"dcn_data": 2, "data": 8}, "needs 8 devices, there are 4 devices of a"),
    ({"dcn_data": 2}, r"of equal size, .* \[3, 5\]", (0, 1, 2)),
    ({"dcn_data": 2}, "dcn_data=2 must be 1", range(8)),
    ({"data": -1, "tensor": 3}, "must divide the 8 devices", range(8)),
    ({"data": 16}, "needs 16 devices", range(8)),
  )
  def test_what_does_not_fit_is_refused(self, axes, message, first=_FIRST):
    with (
      two_slices(first),
      self.assertRaisesRegex(ValueError, message) as caught,
    ):
      sharding.make_mesh(MeshConfig(**axes))
    self.assertNotIn("\n", str(caught.exception))


_SIZES = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}


def _boxed(**model):
  return abstract_params(*make_model(tiny.llm_config(model=model)))


class WholeParamsTest(parameterized.TestCase):
  def test_what_an_axis_does_not_divide_is_listed_the_largest_first(self):
    rows = sharding.unsplit_params(
      _boxed(mlp_dim=27, vocab_size=62), {**_SIZES, "fsdp": 2, "tensor": 2}
    )
    down, up, gate = [one for one in rows if one.why]  # one splits `vocab`
    self.assertEqual(down.name, "blocks0/mlp/down/kernel")
    self.assertEqual(down.why, "tensor=2 does not divide mlp 27")
    self.assertEqual((down.shape, down.whole), ((2, 27, 32), False))
    self.assertEqual(down.bytes, 4 * 2 * 27 * 32 // 2)
    self.assertEqual(rows, sorted(rows, key=lambda one: -one.bytes))
    # Whole by design.
    self.assertEqual(
      {one.name.split("/")[-2] for one in rows if one.whole},
      {"router", "attn_norm", "mlp_norm", "norm"},
    )
    self.assertEqual({up.whole, gate.whole}, {False})
    self.assertEmpty(sharding.unsplit_params(_boxed(), {**_SIZES, "data": 8}))

  def test_limit_refuses_and_names_the_largest(self):
    two = {**_SIZES, "fsdp": 2}
    line = sharding.check_whole(_boxed(), two, 10**6)
    self.assertRegex(line, r"^\d+ parameters \(.* bytes\) whole")
    for sizes, most, message in (
      (two, 10, r"mesh.max_whole=10 bytes: .*router/routed \[2, 32, 3\]"),
      ({**_SIZES, "fsdp": 7}, 10**9, "mesh.fsdp=7 divides no dim"),
      ({**_SIZES, "tensor": 7}, 10**9, "mesh.tensor=7 divides no dim"),
    ):
      with self.assertRaisesRegex(ValueError, message) as caught:
        sharding.check_whole(_boxed(), sizes, most)
      self.assertNotIn("\n", str(caught.exception))


class FitsTest(parameterized.TestCase):
  def test_what_a_run_needs_at_least_is_compared_with_memory(self):
    config = tiny_checkpoint.CONFIG
    mesh = sharding.make_mesh(config.mesh)
    no_state = types.SimpleNamespace(state=(), frozen=None)
    entrance.check_memory(config, mesh, no_state)
    few = apply_overrides(config, "data", prefetch=1, batch_size=1)
    for section, fields, have, message in (
      ("data", {"prefetch": 1024, "batch_size": 1 << 20}, 1 << 40,
       "data.prefetch=1024 batches"),
      ("model", {"image_size": (1 << 12, 1 << 12)}, 1 << 40,
       "tables of relative positions"),
      ("data", {}, 10, "layers' inputs of one example"),
    ):  # fmt: skip
      with (
        mock.patch.object(entrance, "device_bytes", return_value=have),
        self.assertRaisesRegex(ValueError, message),
      ):
        changed = apply_overrides(few, section, **fields)
        entrance.check_memory(changed, mesh, no_state)

  def test_parts_of_a_device_count_and_cpus_share_a_machine(self):
    devices = jax.devices()
    alone, one_of = (
      sharding.device_bytes(devices[0], set(devices[:count]))
      for count in (1, 8)
    )
    self.assertEqual(alone // 8, one_of)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    small, large = (
      jax.ShapeDtypeStruct((size, 1 << 20), jnp.float32, sharding=one)
      for size in (1, 1 << 30)
    )
    sharding.check_tree({"a": small}, "x")
    with self.assertRaisesRegex(ValueError, "^x: at least 4,194,304.0 GiB"):
      sharding.check_tree({"a": small, "b": large}, "x")
