"""The mesh: rows of processes, slices, what stays whole, what fits."""

import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import ClassifierConfig, MeshConfig
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import abstract_params
from moh_jax.training import entrance
from moh_jax.training.classification import mix_images
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


def two_slices(first=(0, 3, 4, 5)):
  """Patch: the devices with these ids are slice 0, the others slice 1."""
  return mock.patch.object(
    sharding, "_slice_of", lambda device: int(device.id not in first)
  )


class SlicesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({},), ({"fsdp": 2},), ({"fsdp": 2, "tensor": 2},), ({"sequence": 4},)
  )
  def test_only_the_data_axis_crosses_slices(self, axes):
    with two_slices():
      mesh = sharding.make_mesh(MeshConfig(dcn_data=2, **axes))
      slice_of = np.vectorize(sharding._slice_of)(mesh.devices)
    self.assertEqual(mesh.shape["data"] % 2, 0)
    half = mesh.shape["data"] // 2
    np.testing.assert_array_equal(slice_of[:half], 0)
    np.testing.assert_array_equal(slice_of[half:], 1)

  @parameterized.parameters(
    (1, {}, "mesh.dcn_data=1 must be 2: the 8 devices are of 2 slice"),
    (3, {}, "mesh.dcn_data=3 must be 2"),
    (2, {"tensor": 8}, "must divide the 4 devices of a slice"),
    (2, {"data": 8}, "needs 8 devices, there are 4 devices of a slice"),
  )
  def test_what_does_not_fit_the_slices_is_refused(self, dcn, axes, message):
    with two_slices(), self.assertRaisesRegex(ValueError, message) as caught:
      sharding.make_mesh(MeshConfig(dcn_data=dcn, **axes))
    self.assertNotIn("\n", str(caught.exception))

  def test_slices_of_unequal_size_are_refused(self):
    with two_slices((0, 1, 2)), self.assertRaisesRegex(ValueError, r"\[3, 5\]"):
      sharding.make_mesh(MeshConfig(dcn_data=2))

  def test_one_slice_has_no_second(self):
    with self.assertRaisesRegex(ValueError, "dcn_data=2 must be 1"):
      sharding.make_mesh(MeshConfig(dcn_data=2))

  def test_dcn_data_must_be_positive(self):
    with self.assertRaisesRegex(ValueError, "mesh.dcn_data=0"):
      MeshConfig(dcn_data=0)


class MixupTest(absltest.TestCase):
  def test_images_are_mixed_inside_each_part(self):
    config = ClassifierConfig(mixup=0.8, cutmix=0.0)
    images = jnp.arange(8.0)[:, None, None, None] * jnp.ones((8, 2, 2, 1))
    targets = jax.nn.one_hot(jnp.arange(8), 8)
    key = jax.random.key(3)
    mixed, labels = mix_images(key, images, targets, config, 4)
    for part in range(4):
      rows = slice(2 * part, 2 * part + 2)
      alone = mix_images(key, images[rows], targets[rows], config)
      np.testing.assert_array_equal(mixed[rows], alone[0])
      np.testing.assert_array_equal(labels[rows], alone[1])
    self.assertGreater(float(jnp.abs(mixed - images).max()), 0)

  def test_a_part_of_one_image_is_refused(self):
    with self.assertRaisesRegex(ValueError, "a batch has 4 on 4"):
      mix_images(
        jax.random.key(0),
        jnp.ones((4, 2, 2, 1)),
        jnp.ones((4, 3)),
        ClassifierConfig(mixup=0.8),
        4,
      )


_SIZES = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}


def _boxed(**model):
  return abstract_params(*make_model(tiny.llm_config(model=model)))


class WholeParamsTest(parameterized.TestCase):
  def test_norms_and_routers_are_whole_by_design(self):
    rows = sharding.unsplit_params(_boxed(), {**_SIZES, "fsdp": 2})
    self.assertCountEqual(
      {(one.name.split("/")[-2], one.why) for one in rows if one.whole},
      [("router", ""), ("attn_norm", ""), ("mlp_norm", ""), ("norm", "")],
    )
    self.assertTrue(all(one.whole for one in rows))

  def test_what_an_axis_does_not_divide_is_listed(self):
    rows = sharding.unsplit_params(
      _boxed(mlp_dim=27), {**_SIZES, "fsdp": 2, "tensor": 2}
    )
    (down,) = [one for one in rows if one.name.endswith("mlp/down/kernel")]
    self.assertEqual(down.why, "tensor=2 does not divide mlp 27")
    self.assertEqual((down.shape, down.whole), ((2, 27, 32), False))
    self.assertEqual(down.bytes, 4 * 2 * 27 * 32 // 2)
    self.assertEqual([one.bytes for one in rows], sorted(
      (one.bytes for one in rows), reverse=True
    ))  # fmt: skip

  def test_a_vocabulary_that_one_axis_divides_is_split_by_it(self):
    rows = sharding.unsplit_params(
      _boxed(vocab_size=62), {**_SIZES, "fsdp": 2, "tensor": 2}
    )
    self.assertEmpty([one for one in rows if one.why])

  def test_nothing_is_listed_where_nothing_is_to_be_split(self):
    self.assertEmpty(sharding.unsplit_params(_boxed(), {**_SIZES, "data": 8}))

  def test_limit_refuses_and_names_the_largest(self):
    sizes = {**_SIZES, "fsdp": 2}
    line = sharding.check_whole(_boxed(), sizes, 10**6)
    self.assertRegex(line, r"^\d+ parameters \(.* bytes\) whole")
    with self.assertRaisesRegex(
      ValueError, r"mesh.max_whole=10 bytes: .*router/routed \[2, 32, 3\]"
    ) as caught:
      sharding.check_whole(_boxed(), sizes, 10)
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters("fsdp", "tensor")
  def test_axis_that_divides_nothing_is_refused(self, axis):
    with self.assertRaisesRegex(ValueError, f"mesh.{axis}=7 divides no dim"):
      sharding.check_whole(_boxed(), {**_SIZES, axis: 7}, 10**9)


_NO_STATE = types.SimpleNamespace(state=())


class FitsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.config = tiny_checkpoint.CONFIG
    self.mesh = sharding.make_mesh(self.config.mesh)

  def _change(self, section, **fields):
    values = dataclasses.replace(getattr(self.config, section), **fields)
    return dataclasses.replace(self.config, **{section: values})

  def test_small_run_passes(self):
    entrance.check_memory(self.config, self.mesh, _NO_STATE)

  def test_batches_prepared_ahead(self):
    config = self._change("data", prefetch=1024, batch_size=1 << 20)
    with self.assertRaisesRegex(ValueError, "data.prefetch=1024 batches"):
      entrance.check_memory(config, self.mesh, None)

  def test_position_tables(self):
    self.config = self._change("data", prefetch=1, batch_size=1)
    config = self._change("model", image_size=(1 << 12, 1 << 12))
    with self.assertRaisesRegex(ValueError, "tables of relative positions"):
      entrance.check_memory(config, self.mesh, None)

  def test_layers_inputs(self):
    with mock.patch.object(entrance, "device_bytes", lambda *_: 10):
      with self.assertRaisesRegex(ValueError, "layers' inputs of one example"):
        entrance.check_memory(self.config, self.mesh, _NO_STATE)

  def test_parts_of_a_device_count(self):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    small, large = (
      jax.ShapeDtypeStruct((size, 1 << 20), jnp.float32, sharding=one)
      for size in (1, 1 << 30)
    )
    sharding.check_tree({"a": small}, "x")
    with self.assertRaisesRegex(ValueError, "^x: at least 4,194,304.0 GiB"):
      sharding.check_tree({"a": small, "b": large}, "x")
