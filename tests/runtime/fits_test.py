import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.runtime import sharding
from moh_jax.training import entrance
from tests.cli import tiny_checkpoint

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


if __name__ == "__main__":
  absltest.main()
