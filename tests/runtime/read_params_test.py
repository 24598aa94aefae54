"""Parameters are read some at a time, in the wanted dtype and sharding."""

import json
import os
import subprocess
import sys
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import NamedSharding, PartitionSpec

from moh_jax.config import MeshConfig
from moh_jax.runtime import checkpoint, sharding
from tests.training import tiny


class ReadParamsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    rng = np.random.default_rng(0)
    cls.params = {
      "a": {
        "kernel": rng.standard_normal((16, 24), np.float32),
        "bias": rng.standard_normal(16, np.float32),
      },
      "b": {"kernel": rng.standard_normal((24, 16), np.float32)},
    }
    cls.folder = cls.create_tempdir(cls()).full_path
    metadata = checkpoint.Metadata(tiny.llm_config())
    # The kernels have several chunks.
    with mock.patch.object(checkpoint, "CHUNK_BYTES", 512):
      checkpoint.save_params(cls.folder, cls.params, metadata)
    cls.mesh = sharding.make_mesh(MeshConfig(fsdp=4, data=2))

  def _abstract(self, dtype, spec=()):
    split = NamedSharding(self.mesh, PartitionSpec(*spec))
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=split),
      self.params,
    )

  def _read(self, abstract):
    return checkpoint.restore_params(self.folder, 0, abstract, use_ema=False)

  @parameterized.parameters(
    (jnp.float32, (), 1), (jnp.float32, ("fsdp",), 1 << 26),
    (jnp.bfloat16, (), 1000), (jnp.bfloat16, ("fsdp",), 1),
  )  # fmt: skip
  def test_arrays_have_the_wanted_dtype_and_sharding(self, dtype, spec, group):
    abstract = self._abstract(dtype, spec)
    with mock.patch.object(checkpoint, "_GROUP_BYTES", group):
      read = self._read(abstract)
    chex.assert_trees_all_equal_shapes_and_dtypes(read, abstract)
    chex.assert_trees_all_equal(
      jax.device_get(read), jax.tree.map(lambda x: x.astype(dtype), self.params)
    )
    for leaf, wanted in zip(jax.tree.leaves(read), jax.tree.leaves(abstract)):
      self.assertTrue(
        leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
      )

  def test_large_arrays_are_read_first_and_alone(self):
    leaves = {
      (name,): jax.ShapeDtypeStruct((size,), jnp.bfloat16)
      for name, size in (("small", 10), ("large", 900), ("tiny", 1))
    }
    with mock.patch.object(checkpoint, "_GROUP_BYTES", 1000):
      groups = [list(group) for group in checkpoint._groups(leaves)]
    self.assertEqual(groups, [[("large",)], [("small",), ("tiny",)]])

  @parameterized.parameters(
    ({"c": ["kernel"]}, "differing: c/kernel$"),
    ({"a": []}, "differing: a/bias, a/kernel$"),
  )
  def test_other_arrays_are_refused_by_name(self, change, message):
    abstract = self._abstract(jnp.float32)
    leaf = abstract["b"]["kernel"]
    abstract |= {n: dict.fromkeys(leaves, leaf) for n, leaves in change.items()}
    with self.assertRaisesRegex(
      ValueError, rf"step 0: item params cannot be read: .*{message}"
    ):
      self._read(abstract)


@pytest.mark.slow
class MemoryTest(parameterized.TestCase):
  @parameterized.parameters(1, 4)
  def test_bfloat16_takes_less_than_a_third_more_than_the_result(self, devices):
    """Float32 parameters whose bfloat16 has 1 GB; measured, not estimated."""
    folder = self.create_tempdir().full_path
    flags = f"--xla_force_host_platform_device_count={devices}"
    for half in ("write", "restore"):
      done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.restore_memory", half, folder],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
      )
    found = json.loads(done.stdout.splitlines()[-1])
    self.assertGreater(found["result"], 0.9e9)
    self.assertLess(found["peak"], 1.3 * found["result"])
