"""The Hopper kernels, compiled for an H100 that need not be here."""

import glob
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.attention_forms import Call, Visible
from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels.attention import block_sizes, kernel_attention
from moh_jax.runtime.devices import absent_devices, missing_packages

pytestmark = pytest.mark.compiles
_KERNELS = ("forward", "query_gradient", "key_gradients")
_PTXAS = shutil.which("ptxas")


def _compile(
  head_dim: int, masks: str, tokens: int, group: int, dtype: str
) -> str:
  """The compiled text of attention with its gradients, 8 heads."""
  mesh = jax.sharding.Mesh(absent_devices("h100")[:1], ("data",))
  with jax.set_mesh(mesh):
    sharding = jax.NamedSharding(mesh, jax.P())

    def array(*shape: int, dtype=dtype) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((2, *shape), dtype, sharding=sharding)

    rows = block_sizes("mosaic_gpu", head_dim, dtype).rows

    def call(q, k, v, grad, active, segments, key_mask):
      visible = Visible(
        key_mask if masks == "all" else None,
        segments if masks in ("all", "segments") else None,
        masks in ("all", "causal"),
      )
      blocks = head_blocks(ActiveHeads(active, 4), rows)
      attend = lambda q, k, v: kernel_attention(  # noqa: E731
        Call(q, k, v, visible, head_dim**-0.5), blocks, backend="mosaic_gpu"
      )
      out, pull = jax.vjp(attend, q, k, v)
      return out, *pull(grad)

    q = array(tokens, 8, head_dim)
    k = array(tokens, 8 // group, head_dim)
    arrays = q, k, k, q, array(tokens, 8, dtype=jnp.bool_)
    arrays += array(tokens, dtype=jnp.int32), array(tokens, dtype=jnp.bool_)
    return jax.jit(call).lower(*arrays).compile().as_text()


@unittest.skipIf(missing_packages("h100"), "no compiler for GPUs")
class CompiledTest(parameterized.TestCase):
  def _check(self, *options, spills: bool = False) -> None:
    """Compiles attention with gradients; checks the text of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
      variables = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
      with mock.patch.dict(os.environ, variables):
        program = _compile(*options)
      self.assertEqual(program.count('custom_call_target="mosaic_gpu'), 3)
      for kernel in _KERNELS:
        [path] = glob.glob(f"{folder}/moh_{kernel}_kernel_*.ptx")
        ptx = pathlib.Path(path).read_text()
        self.assertIn("wgmma.mma_async", ptx)
        self.assertNotIn("mma.sync", ptx)
        [passes] = glob.glob(f"{folder}/moh_{kernel}_kernel_*passes.log")
        self.assertNotIn("scf.while", pathlib.Path(passes).read_text())
        if _PTXAS:
          self._check_registers(path, spills)

  def _check_registers(self, path: str, spills: bool) -> None:
    command = [_PTXAS, "-v", "-arch=sm_90a", path, "-o", os.devnull]
    result = subprocess.run(command, capture_output=True, text=True)
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertNotIn("serialized", result.stderr)
    if not spills:
      self.assertIn(" 0 bytes spill stores", result.stderr)

  @parameterized.product(
    head_dim=(64, 96, 128, 256), masks=("none", "causal", "segments", "all")
  )
  def test_h100(self, head_dim, masks):
    self._check(head_dim, masks, 2048, 1, "bfloat16", spills=head_dim > 128)

  @parameterized.parameters(
    (64, "causal", 1000, 4, "float16"), (128, "causal", 1000, 4, "bfloat16"),
    (128, "all", 1000, 2, "bfloat16"), (64, "none", 40, 1, "bfloat16"),
  )  # fmt: skip
  def test_odd_lengths_and_groups(self, *options):
    self._check(*options)


if __name__ == "__main__":
  absltest.main()
