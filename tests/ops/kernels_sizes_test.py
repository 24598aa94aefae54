"""Sizes of the kernels' blocks and tiles: defaults, and measured ones."""

import dataclasses
import json
import os
from unittest import mock

import jax.numpy as jnp
from absl.testing import parameterized

from moh_jax.ops.kernels import attention as kernels
from moh_jax.ops.kernels import triton
from moh_jax.ops.kernels.attention import block_sizes
from moh_jax.ops.kernels.problem import BlockSizes, Tile
from tests.ops import devices

_TILES = BlockSizes(Tile(32, 64), Tile(16, 64), Tile(16, 64))


class SizesTest(parameterized.TestCase):
  @parameterized.product(
    backend=("triton", "mosaic_tpu"),
    dtype=(jnp.bfloat16, jnp.float16, jnp.float32),
    head_dim=(24, 64, 72, 128, 256),
  )
  def test_every_backend_has_tiles(self, backend, dtype, head_dim):
    tiles = block_sizes(backend, head_dim, dtype)
    for tile in (tiles.dq, tiles.dkv):
      self.assertEqual(tiles.rows % tile.rows, 0)
    few = block_sizes(backend, head_dim, dtype, per_head=100)
    self.assertLessEqual(few.rows, tiles.rows)
    self.assertLessEqual(few.rows, 128)

  def test_blocks_with_fewer_rows_cut_every_tile(self):
    tiles = BlockSizes(Tile(128, 64, 8), Tile(64, 32), Tile(64, 32, 8))
    expected = BlockSizes(Tile(32, 64, 4), Tile(32, 32), Tile(32, 32, 8))
    self.assertEqual(tiles.with_rows(32), expected)

  @parameterized.parameters(
    (8, ((0, 16),)), (24, ((0, 32),)), (64, ((0, 64),)),
    (72, ((0, 64), (64, 16))), (80, ((0, 64), (64, 16))), (120, ((0, 128),)),
    (192, ((0, 128), (128, 64))),
  )  # fmt: skip
  def test_head_dims_become_powers_of_two(self, dim, slices):
    self.assertEqual(triton.column_slices(dim, 2), slices)
    self.assertLen(triton.column_slices(dim, 1), 1)


class TileFileTest(parameterized.TestCase):
  def _file(self, **changes):
    """With the tiles of one GPU, but for some fields of the entry."""
    entry = {"backend": "triton", "device": "GPU X"}
    entry |= {"head_dim": 64, "dtype": "bfloat16"}
    entry |= dataclasses.asdict(_TILES) | changes
    return self.create_tempfile(content=json.dumps([entry])).full_path

  def test_file_of_tiles_is_used(self):
    with mock.patch.dict(os.environ, {kernels.FILE_VARIABLE: self._file()}):
      kernels.measured.cache_clear()
      self.addCleanup(kernels.measured.cache_clear)
      other = block_sizes("triton", 64, jnp.bfloat16)
      default = block_sizes("triton", 128, jnp.bfloat16)
      with devices.traced_for("gpu", "GPU X"):
        ours = block_sizes("triton", 64, jnp.bfloat16)
        self.assertEqual(ours, _TILES)
        self.assertNotEqual(ours, other)
        self.assertEqual(block_sizes("triton", 128, jnp.bfloat16), default)

  @parameterized.parameters('[{"device": "GPU X"}]', "[{", '["GPU X"]', "1")
  def test_other_files_are_named(self, content):
    path = self.create_tempfile(content=content).full_path
    text = f"{path} is not a file of block sizes, for MOH_JAX_BLOCK_SIZES: "
    with self.assertRaisesRegex(ValueError, text):
      kernels.read(path)

  @parameterized.parameters(
    ({"head_dim": 0}, r"head_dim=0 must be in \[1, 256\]"),
    ({"head_dim": 320}, r"head_dim=320 must be in \[1, 256\]"),
    ({"dtype": "float23"}, "float23"),
    ({"dq": {"rows": 48, "keys": 16}}, "dq.rows=48 must divide .*rows=32"),
    ({"dkv": {"rows": 64, "keys": 16}}, "dkv.rows=64 must divide .*rows=32"),
    ({"dkv": {"rows": 0, "keys": 16}}, "dkv: rows=0 must be .* at least 1"),
    ({"dq": {"rows": 16, "keys": 16, "warps": 0}}, "dq: warps=0 must be"),
    ({"dq": {"rows": 16, "keys": 16, "stages": -1}}, "dq: stages=-1 must be"),
    ({"forward": {"rows": 32, "keys": 1.5}}, "forward: keys=1.5 must be an"),
    ({"forward": {"rows": 32}}, "forward: .*'keys'"),
  )
  def test_wrong_entries_are_named(self, changes, text):
    path = self._file(**changes)
    with self.assertRaisesRegex(ValueError, f"{path} .*{text}"):
      kernels.read(path)
