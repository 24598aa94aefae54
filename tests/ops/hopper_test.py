"""The Hopper kernels in Pallas's simulator, against plain attention."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels import hopper, hopper_program
from moh_jax.ops.kernels.attention import kernel_attention
from moh_jax.ops.kernels.hopper import KeyLaunch, RowLaunch
from moh_jax.ops.kernels.hopper_program import Ring
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import BlockSizes, Tile
from moh_jax.ops.target import Target
from moh_jax.ops.visible import Visible
from tests.ops import devices


@dataclasses.dataclass(frozen=True)
class _Case:
  """Shapes and masks; four query heads, half of them active."""

  batch: int = 1
  tokens: int = 150
  kv_heads: int = 2
  head_dim: int = 64
  dtype: str = "bfloat16"
  causal: bool = False
  documents: bool = False
  padding: bool = False
  rows: int = 128
  keys: int = 64
  row_part: int = 64
  key_part: int = 128
  scale: float = 0.125

  def arrays(self) -> list[jax.Array]:
    """Queries, keys, values and a gradient of the output."""
    rng = np.random.default_rng(0)
    heads = 4, self.kv_heads, self.kv_heads, 4
    shapes = [(self.batch, self.tokens, x, self.head_dim) for x in heads]
    return [jnp.asarray(rng.normal(size=x), self.dtype) for x in shapes]

  def active(self) -> jax.Array:
    shape = self.batch, self.tokens, 4
    return jnp.asarray(np.random.default_rng(1).random(shape) < 0.5)

  def visible(self) -> Visible:
    rng, shape = np.random.default_rng(2), (self.batch, self.tokens)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, shape)), jnp.int32)
    key_mask = rng.random(shape) < 0.8
    key_mask[0] = False  # a text without any key to see
    return Visible(
      jnp.asarray(key_mask) if self.padding else None,
      segments if self.documents else None,
      self.causal,
    )

  def sizes(self) -> BlockSizes:
    forward = Tile(self.rows, self.keys)
    return BlockSizes(forward, forward, Tile(self.row_part, self.key_part))


_CASES = {
  "bidirectional": _Case(),
  "causal": _Case(causal=True, kv_heads=1, batch=2, tokens=100),
  "masks": _Case(
    causal=True,
    documents=True,
    padding=True,
    dtype="float16",
    batch=2,
    tokens=100,
  ),
  "one_consumer": _Case(rows=64, tokens=128, documents=True, scale=-0.3),
  "large_head": _Case(head_dim=256, key_part=64, causal=True, tokens=100),
  "head_dim_96": _Case(head_dim=96, tokens=64, kv_heads=4),
}
# The interpreter takes 10 to 20 s for each: `pytest -m slow` runs the others.
_ALWAYS = ("causal", "masks")


def _plain(case: _Case, q, k, v):
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  k, v = (jnp.repeat(x, 4 // case.kv_heads, 2) for x in (k, v))
  logits = jnp.einsum("bnhd,bmhd->bhnm", q, k) * case.scale
  seen = case.visible().mask(case.tokens, case.tokens)
  seen = True if seen is None else seen
  logits = jnp.where(seen, logits, -1e30)
  weights = jnp.where(seen, jax.nn.softmax(logits, -1), 0)
  out = jnp.einsum("bhnm,bmhd->bnhd", weights, v)
  return jnp.where(case.active()[..., None], out, 0)


def _kernels(case: _Case, q, k, v):
  blocks = head_blocks(ActiveHeads(case.active(), 4), case.rows)
  return kernel_attention(
    q, k, v, case.visible(), blocks, case.scale, backend="mosaic_gpu",
    sizes=case.sizes(), interpret=True,
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_gradients(attend, case, arrays):
  out, pull = jax.vjp(functools.partial(attend, case), *arrays[:3])
  return [out, *pull(arrays[3].astype(out.dtype))]


class InterpretedTest(parameterized.TestCase):
  @parameterized.parameters(*_ALWAYS)
  def test_equals_plain_attention(self, name):
    _check_equal(self, _CASES[name])

  @parameterized.parameters(*sorted(_CASES.keys() - _ALWAYS))
  @pytest.mark.slow
  def test_other_cases_equal_plain_attention(self, name):
    _check_equal(self, _CASES[name])

  @parameterized.parameters(*sorted(_CASES))
  @pytest.mark.slow
  def test_nothing_unwritten_is_read_and_no_slot_while_it_is_filled(self, name):
    # Whole tiles: what a copy reads beyond an array would be NaN too. JAX 0.10
    # detects no races of GPUs, which is no error of its own.
    case = dataclasses.replace(_CASES[name], tokens=128)
    params = dataclasses.replace(
      hopper_program._interpreter(),
      detect_races=True,
      uninitialized_memory="nan",
      out_of_bounds_reads="raise",
    )
    release = Ring.release

    def committed(ring, step):
      # Products read shared memory as copies do, but here as threads do.
      plgpu.commit_smem()
      release(ring, step)

    with (
      mock.patch.object(hopper_program, "_interpreter", lambda: params),
      mock.patch.object(Ring, "release", committed),
    ):
      _check_equal(self, case)


def _check_equal(test, case: _Case):
  results = _with_gradients(_kernels, case, case.arrays())
  expected = _with_gradients(_plain, case, case.arrays())
  for got, want in zip(results, expected, strict=True):
    test.assertEqual(got.dtype, case.dtype)
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    atol = 2e-2 * max(np.abs(want).max(), 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def _problem(case: _Case) -> Problem:
  blocks = head_blocks(ActiveHeads(case.active(), 4), case.rows)
  shape = case.batch, case.tokens, case.kv_heads, case.head_dim
  dtype = jnp.dtype(case.dtype)
  return Problem(shape, dtype, case.visible(), blocks, 1.0, True)


class TablesTest(parameterized.TestCase):
  @parameterized.parameters("bidirectional", "causal")
  def test_every_tile_of_rows_is_visited_once(self, name):
    case = dataclasses.replace(_CASES[name], tokens=900, batch=3, rows=64)
    problem = _problem(case)
    table, used = RowLaunch(problem, Tile(64, 64), 1).table()
    tiles = np.asarray(table)[:, 0]
    np.testing.assert_array_equal(np.sort(tiles), np.arange(len(tiles)))
    self.assertLess(int(used[0]), len(tiles))
    self.assertTrue((tiles[: int(used[0])] < int(used[0])).all())

  @parameterized.parameters("bidirectional", "causal")
  def test_every_tile_of_keys_is_visited_once(self, name):
    case = dataclasses.replace(_CASES[name], tokens=900, batch=3)
    table = KeyLaunch(_problem(case), Tile(64, 128), 2).table()
    expected = np.ndindex(8, case.batch, case.kv_heads)
    self.assertCountEqual(map(tuple, np.asarray(table).tolist()), expected)

  @parameterized.parameters((78, 78), (None, 132))
  def test_grid_is_as_large_as_the_gpu(self, cores, programs):
    problem = dataclasses.replace(_problem(_Case()), interpret=False)
    with devices.traced_for("gpu", "NVIDIA H20", cores):
      launch = KeyLaunch(problem, Tile(64, 128), 2)
      self.assertEqual(launch.programs, programs)


class SupportsTest(parameterized.TestCase):
  def test_dtypes_and_head_dims(self):
    unable = functools.partial(
      hopper.Hopper().unable, Target("gpu", "NVIDIA H200")
    )
    self.assertEqual(unable("bfloat16", 96), "")
    self.assertIn("float32", unable("float32", 64))
    self.assertIn("72", unable("float16", 72))

  @parameterized.parameters(
    (_Case(dtype="float32"), "not float32, float32"),
    (_Case(head_dim=72), "head_dim in .* 72"),
    (_Case(rows=32), "rows=32 of a block must be 64 or 128"),
  )
  def test_others_are_refused(self, case, text):
    with self.assertRaisesRegex(ValueError, text):
      _kernels(case, *case.arrays()[:3])


if __name__ == "__main__":
  absltest.main()
