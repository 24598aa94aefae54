"""Parameters are read some at a time, in the wanted dtype and sharding."""

import pathlib
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
from moh_jax.runtime import checkpoint
from moh_jax.runtime.mesh import make_mesh
from tests.training import tiny
from tests.two_processes import python


class ReadParamsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    normal = np.random.default_rng(0).standard_normal
    cls.params = {
      "a": {"kernel": normal((16, 24), "f"), "bias": normal(16, "f")},
      "b": {"kernel": normal((24, 16), "f")},
    }
    cls.folder = cls.create_tempdir(cls()).full_path
    metadata = checkpoint.Metadata(tiny.llm_config())
    # The kernels have several chunks.
    with mock.patch.object(checkpoint, "CHUNK_BYTES", 512):
      checkpoint.save_params(cls.folder, cls.params, metadata)
    cls.mesh = make_mesh(MeshConfig(fsdp=4, data=2))

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

  def test_a_directory_with_checkpoints_is_refused(self):
    metadata = checkpoint.Metadata(tiny.llm_config())
    with self.assertRaisesRegex(ValueError, r"already holds checkpoints \[0\]"):
      checkpoint.save_params(self.folder, self.params, metadata)

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


_RESTORE = "from tests.runtime import read_params_test as t; t.restore()"


def _blocks():
  """1 GB of abstract parameters in bfloat16."""
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
  split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  kernel = jax.ShapeDtypeStruct((8, 1024, 3072), "bfloat16", sharding=split)
  return {f"kernel{index}": kernel for index in range(20)}


def restore() -> None:
  """Prints the most memory that restoring takes, over the result's bytes."""
  abstract = _blocks()
  jax.block_until_ready(jnp.zeros(8))
  before = _kilobytes("VmRSS")
  params = checkpoint.restore_params(sys.argv[1], 0, abstract, use_ema=False)
  jax.block_until_ready(params)
  used = 1024 * (_kilobytes("VmHWM") - before)
  print(used / sum(x.nbytes for x in jax.tree.leaves(params)))


def _kilobytes(name: str) -> int:
  # Not `getrusage`: its maximum is that of the process that called exec, too.
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split(f"{name}:")[1].split()[0])


@pytest.mark.slow
class MemoryTest(parameterized.TestCase):
  def test_bfloat16_takes_less_than_a_third_more_than_the_result(self):
    """Float32 parameters whose bfloat16 has 1 GB; measured, not estimated."""
    folder, rng = self.create_tempdir().full_path, np.random.default_rng(0)
    params = jax.tree.map(
      lambda x: rng.standard_normal(x.shape, np.float32), _blocks()
    )
    metadata = checkpoint.Metadata(tiny.llm_config())
    checkpoint.save_params(folder, params, metadata)
    for devices in (1, 4):
      flags = f"--xla_force_host_platform_device_count={devices}"
      # glibc gives freed chunks back, so that only what is held counts.
      environ = {"XLA_FLAGS": flags, "MALLOC_MMAP_THRESHOLD_": "1048576"}
      _, out, _ = python("-c", _RESTORE, folder, **environ)
      self.assertLess(float(out.splitlines()[-1]), 1.3)
