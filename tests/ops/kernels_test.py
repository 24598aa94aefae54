"""The GPU and TPU kernels, interpreted, against NumPy; and that they lower."""

import dataclasses
import functools
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.blocked import blocked_attention
from moh_jax.ops.head_blocks import ActiveHeads, all_blocks, head_blocks
from moh_jax.ops.kernels.attention import kernel_attention
from moh_jax.ops.kernels.backends import block_sizes, kernel_options
from moh_jax.ops.kernels.problem import (
  Problem,
  keys_of_rows,
  rows_of_keys,
)
from moh_jax.ops.kernels.sizes import BlockSizes, Tile
from moh_jax.ops.target import target
from moh_jax.ops.visible import Visible
from tests.ops import devices

_BACKENDS = ("triton", "mosaic_tpu")


@dataclasses.dataclass(frozen=True)
class _Case:
  """Shapes and masks; every table has blocks of 16 rows."""

  batch: int = 2
  queries: int = 37
  keys: int = 37
  heads: int = 4
  kv_heads: int = 4
  head_dim: int = 24
  causal: bool = False
  key_mask: bool = False
  segments: bool = False
  choice: str = "random"  # of heads
  scale: float | None = None

  def factor(self) -> float:
    return self.head_dim**-0.5 if self.scale is None else self.scale

  def arrays(self, dtype=jnp.float32) -> list[jax.Array]:
    """Queries, keys, values and a gradient of the output."""
    rng = np.random.default_rng(0)
    shapes = (
      (self.queries, self.heads),
      (self.keys, self.kv_heads),
      (self.keys, self.kv_heads),
      (self.queries, self.heads),
    )
    return [
      jnp.asarray(rng.normal(size=(self.batch, *shape, self.head_dim)), dtype)
      for shape in shapes
    ]

  def visible(self) -> Visible:
    rng = np.random.default_rng(1)
    key_mask = segments = None
    if self.key_mask:
      key_mask = rng.random((self.batch, self.keys)) < 0.7
      key_mask[0] = False  # nothing to see at all
      key_mask = jnp.asarray(key_mask)
    if self.segments:
      segments = np.sort(rng.integers(0, 4, (self.batch, self.queries)), -1)
      segments = jnp.asarray(segments, jnp.int32)
    return Visible(key_mask, segments, self.causal)

  def active(self) -> np.ndarray:
    """[B, N, H] bool."""
    shape = self.batch, self.queries, self.heads
    if self.choice == "random":
      mask = np.random.default_rng(2).random(shape) < 0.5
      mask[..., -1] = False  # one head that nobody chose
      return mask
    mask = np.zeros(shape, bool)
    if self.choice == "one head":
      mask[..., 1] = True
    return mask

  def blocks(self, rows: int = 16):
    active = ActiveHeads(jnp.asarray(self.active()), self.heads)
    return head_blocks(active, rows)


_CASES = {
  "bidirectional": _Case(),
  "whole_blocks": _Case(queries=32, keys=32, head_dim=16),
  "causal": _Case(causal=True, head_dim=80),
  "fewer_queries": _Case(queries=13, causal=True, kv_heads=2),
  "fewer_keys": _Case(keys=13, causal=True),
  "grouped": _Case(kv_heads=1, keys=48, head_dim=80),
  "key_mask": _Case(key_mask=True, kv_heads=2),
  "segments": _Case(segments=True),
  "all_masks": _Case(segments=True, causal=True, key_mask=True, kv_heads=2),
  "one_head": _Case(choice="one head", causal=True, scale=-0.3),
  "no_head": _Case(choice="none", batch=1),
  "one_token": _Case(queries=1, keys=1, batch=1, kv_heads=1),
  # Several heads share the lanes of a TPU.
  "two_in_lanes": _Case(head_dim=64, causal=True, key_mask=True),
  "four_in_lanes": _Case(head_dim=32, segments=True),
  "grouped_in_lanes": _Case(heads=8, head_dim=32, causal=True),
  "groups_of_three_in_lanes": _Case(heads=6, kv_heads=2, head_dim=64),
}


def _reference(case: _Case, dtype=jnp.float32) -> list[np.ndarray]:
  """Output and gradients of queries, keys and values, float64."""
  q, k, v, grad = (np.asarray(x, np.float64) for x in case.arrays(dtype))
  group = case.heads // case.kv_heads
  k, v = (np.repeat(x, group, axis=2) for x in (k, v))
  logits = np.einsum("bnhd,bmhd->bhnm", q, k) * case.factor()
  seen = case.visible().mask(case.queries, case.keys)
  seen = np.ones((), bool) if seen is None else np.asarray(seen)
  active = case.active().transpose(0, 2, 1)[..., None]
  weights = np.exp(logits - logits.max(-1, keepdims=True)) * (seen & active)
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total > 0, total, 1)
  out = np.einsum("bhnm,bmhd->bnhd", weights, v)
  dv = np.einsum("bhnm,bnhd->bmhd", weights, grad)
  dweights = np.einsum("bnhd,bmhd->bhnm", grad, v)
  inner = (weights * dweights).sum(-1, keepdims=True)
  dlogits = weights * (dweights - inner) * case.factor()
  dq = np.einsum("bhnm,bmhd->bnhd", dlogits, k)
  dk = np.einsum("bhnm,bnhd->bmhd", dlogits, q)

  def of_groups(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(3)

  return [out, dq, of_groups(dk), of_groups(dv)]


def _tiles(rows: int = 16, keys: int = 16, part: int = 16) -> BlockSizes:
  """Several blocks of keys, and of rows, in the smallest arrays."""
  tile = Tile(part, keys)
  return BlockSizes(Tile(rows, keys), tile, tile)


@functools.partial(jax.jit, static_argnames=("case", "backend", "tiles"))
def _kernels(case, arrays, blocks, *, backend, tiles):
  devices.need(backend)

  def attend(q, k, v):
    return kernel_attention(
      q, k, v, case.visible(), blocks, case.factor(),
      backend=backend, sizes=tiles, interpret=True,
    )  # fmt: skip

  out, pull = jax.vjp(attend, *arrays[:3])
  return [out, *pull(arrays[3].astype(out.dtype))]


def _assert_close(results, expected, tolerance=2e-6, gradient_tolerance=1e-5):
  for i, (got, want) in enumerate(zip(results, expected)):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    atol = (gradient_tolerance if i else tolerance) * max(np.abs(want).max(), 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


class InterpretedTest(parameterized.TestCase):
  @parameterized.product(name=list(_CASES), backend=_BACKENDS)
  def test_equals_numpy(self, name, backend):
    case = _CASES[name]
    results = _kernels(
      case, case.arrays(), case.blocks(), backend=backend, tiles=_tiles()
    )
    _assert_close(results, _reference(case))

  @parameterized.parameters(
    (jnp.bfloat16, "triton"),
    (jnp.bfloat16, "mosaic_tpu"),
    (jnp.float16, "triton"),
  )
  def test_16_bits_are_close_to_numpy(self, dtype, backend):
    case = _CASES["fewer_queries"]
    results = _kernels(
      case, case.arrays(dtype), case.blocks(), backend=backend, tiles=_tiles()
    )
    chex.assert_type(results, dtype)
    _assert_close(results, _reference(case, dtype), 2e-2, 2e-2)

  def test_values_may_have_another_dtype(self):
    case = _CASES["fewer_queries"]
    q, k, v, grad = case.arrays()
    arrays = [q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), v, grad]
    results = _kernels(
      case, arrays, case.blocks(), backend="triton", tiles=_tiles()
    )
    dtypes = [jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.float32]
    chex.assert_type(results, dtypes)
    _assert_close(results, _reference(case), 2e-2, 2e-2)

  @parameterized.parameters(("triton", 32, 64, 16), ("mosaic_tpu", 32, 32, 32))
  def test_any_tile_gives_the_same(self, backend, rows, keys, part):
    case = _CASES["all_masks"]
    tiles = _tiles(rows, keys, part)
    results = _kernels(
      case, case.arrays(), case.blocks(rows), backend=backend, tiles=tiles
    )
    _assert_close(results, _reference(case))

  @parameterized.parameters(*_BACKENDS)
  def test_equals_plain_xla_where_all_heads_are_active(self, backend):
    case = _Case(kv_heads=2, causal=True)
    *inputs, grad = case.arrays()
    blocks = all_blocks(case.batch, case.queries, case.heads, 16)
    results = _kernels(
      case, case.arrays(), blocks, backend=backend, tiles=_tiles()
    )
    rest = None, case.visible(), blocks, case.factor()
    out, pull = jax.vjp(lambda *x: blocked_attention(*x, *rest), *inputs)
    _assert_close(results, [out, *pull(grad)])

  @parameterized.parameters(*_BACKENDS)
  def test_vmap_maps_tables_too(self, backend):
    case = _Case(batch=1, queries=20, keys=20, causal=True)
    blocks = [case.blocks(), all_blocks(1, 20, 4, 16)]
    most = max(len(x.token) for x in blocks)
    self.assertEqual([len(x.token) for x in blocks], [most] * 2)
    arrays = [case.arrays(), [x[:, ::-1] for x in case.arrays()]]
    call = functools.partial(_kernels, case, backend=backend, tiles=_tiles())
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *zip(arrays, blocks))
    together = jax.vmap(call)(*stacked)
    for i in range(2):
      alone = call(arrays[i], blocks[i])
      _assert_close([x[i] for x in together], alone)

  @parameterized.parameters(*_BACKENDS)
  def test_keys_after_the_last_token_are_not_read(self, backend):
    case = _Case(causal=True)
    q, k, v, grad = case.arrays()
    early = np.arange(case.queries)[:, None] < 16
    active = ActiveHeads(jnp.asarray(case.active() & early), case.heads)
    after = (jnp.arange(case.keys) >= 16)[:, None, None]
    k, v = (jnp.where(after, jnp.nan, x) for x in (k, v))
    out, dq, _, _ = _kernels(
      case, [q, k, v, grad], head_blocks(active, 16), backend=backend,
      tiles=_tiles(),
    )  # fmt: skip
    chex.assert_tree_all_finite((out, dq))
    self.assertGreater(float(jnp.abs(out).max()), 0)

  @parameterized.parameters(
    (jnp.float32, "triton"),
    (jnp.bfloat16, "triton"),
    (jnp.float16, "triton"),
    (jnp.float32, "mosaic_tpu"),
  )
  def test_rows_without_a_pair_have_no_query(self, dtype, backend):
    case = _Case(choice="one head")  # not the first one
    q, k, v, grad = case.arrays(dtype)
    foreign = q.at[0, 0, 0].set(100)  # logits of -1,000
    results, expected = (
      _kernels(
        case, [x, k - 3, v, grad], case.blocks(), backend=backend,
        tiles=_tiles(),
      )
      for x in (foreign, q)
    )  # fmt: skip
    chex.assert_tree_all_finite(results)
    chex.assert_trees_all_equal(results, expected)


class ErrorsTest(absltest.TestCase):
  def _call(self, dtype=jnp.float32, rows=16, **options):
    devices.need(options["backend"])
    case = _CASES["one_token"]
    q, k, v, _ = case.arrays(dtype)
    kernel_attention(
      q, k, v, Visible(), case.blocks(rows), 1.0, interpret=True, **options
    )

  def test_unknown_backend_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "backend='npu' .*'triton'"):
      self._call(backend="npu")

  def test_other_dtypes(self):
    with self.assertRaisesRegex(ValueError, "q is int32, .* bfloat16"):
      self._call(dtype=jnp.int32, backend="triton")

  def test_rows_that_the_hardware_lacks(self):
    with self.assertRaisesRegex(ValueError, "rows=24 .* power of two"):
      self._call(rows=24, backend="triton")
    with self.assertRaisesRegex(ValueError, "rows=12 .* multiple of 8"):
      self._call(rows=12, backend="mosaic_tpu")

  def test_tiles_that_do_not_make_up_a_block(self):
    tiles = BlockSizes(Tile(64, 16), Tile(32, 16), Tile(48, 16))
    with self.assertRaisesRegex(ValueError, "dkv.rows=48 must divide .*=64"):
      self._call(rows=64, backend="triton", sizes=tiles)

  def test_table_of_other_shapes(self):
    q, k, v, _ = _Case(queries=5).arrays()
    with self.assertRaises(AssertionError):
      kernel_attention(
        q, k, v, Visible(), _Case(queries=6).blocks(), 1.0, backend="triton"
      )


def _traced(backend, dtype, sharding=None, **options):
  """Attention with gradients for a device, default tiles, heads chosen."""
  devices.need(backend, lowers=True)
  case = _Case(queries=200, keys=200, heads=8, kv_heads=4, **options)
  shapes = jax.eval_shape(lambda: case.arrays(dtype))
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
  )
  rows = block_sizes(backend, case.head_dim, dtype).rows

  def call(q, k, v, grad):
    def attend(q, k, v):
      return kernel_attention(
        q, k, v, case.visible(), case.blocks(rows), 1.0, backend=backend
      )

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(grad)

  return jax.jit(call).trace(*shapes)


_OPTIONS = {
  "plain": {"head_dim": 72},
  "causal": {"head_dim": 64, "causal": True},
  "masks": {
    "head_dim": 128, "causal": True, "key_mask": True, "segments": True,
  },
}  # fmt: skip


class LoweringTest(parameterized.TestCase):
  """What a machine without the device can check: that kernels lower."""

  @parameterized.product(name=list(_OPTIONS), dtype=(jnp.bfloat16, jnp.float32))
  def test_to_triton(self, name, dtype):
    with devices.as_if_on_a_gpu():
      traced = _traced("triton", dtype, **_OPTIONS[name])
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    self.assertEqual(text.count("__gpu$xla.gpu.triton"), 3)

  @parameterized.product(name=list(_OPTIONS), dtype=(jnp.bfloat16, jnp.float32))
  def test_to_mosaic(self, name, dtype):
    traced = _traced("mosaic_tpu", dtype, **_OPTIONS[name])
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    self.assertEqual(text.count("@tpu_custom_call"), 3)


class DeviceTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  @unittest.skipUnless(devices.BACKEND, "there is no GPU or TPU")
  def test_on_this_gpu_or_tpu_equals_numpy(self, name):
    case = _CASES[name]
    rows = block_sizes(devices.BACKEND, case.head_dim, jnp.float32).rows

    def attend(q, k, v):
      return kernel_attention(
        q, k, v, case.visible(), case.blocks(rows), case.factor(),
        backend=devices.BACKEND,
      )  # fmt: skip

    with jax.default_matmul_precision("highest"):
      *inputs, grad = case.arrays()
      out, pull = jax.vjp(jax.jit(attend), *inputs)
      results = [out, *pull(grad)]
    _assert_close(results, _reference(case), 1e-4, 1e-4)

  @parameterized.product(head_dim=(64, 128, 256), causal=(False, True))
  @unittest.skipUnless(devices.BACKEND, "there is no GPU or TPU")
  def test_16_bits_on_this_gpu_or_tpu(self, head_dim, causal):
    case = _Case(
      queries=200, keys=200, heads=8, kv_heads=4, head_dim=head_dim,
      causal=causal,
    )  # fmt: skip
    options = kernel_options(target(), "bfloat16", head_dim)
    rows = block_sizes(options["backend"], head_dim, jnp.bfloat16).rows

    def attend(q, k, v):
      return kernel_attention(
        q, k, v, case.visible(), case.blocks(rows), case.factor(), **options
      )

    *inputs, grad = case.arrays(jnp.bfloat16)
    out, pull = jax.vjp(jax.jit(attend), *inputs)
    results = [x.astype(jnp.float32) for x in (out, *pull(grad))]
    _assert_close(results, _reference(case), 2e-2, 5e-2)


# Lengths of queries and keys, and what hides keys; segments need as many
# queries as keys.
_TABLES = [
  (lengths, masks)
  for lengths in ((13, 13), (13, 37), (37, 13), (37, 37), (64, 64))
  for masks in ("none", "causal", "segments", "padded", "prefix", "all")
  if lengths[0] == lengths[1] or masks in ("none", "causal", "prefix")
]


class TablesTest(parameterized.TestCase):
  """Tiles that loops visit, against a count of the pairs that are visible."""

  @parameterized.product(table=_TABLES, rows=(8, 16), block=(16,))
  def test_loops_visit_what_is_seen_and_no_more(self, table, rows, block):
    (queries, keys), masks = table
    case = _Case(queries=queries, keys=keys, kv_heads=2)
    visible = _ranges_of_keys(masks, case)
    table = case.blocks()
    shape = case.batch, keys, case.kv_heads, case.head_dim
    problem = Problem(shape, jnp.float32, visible, table, 1.0, True)
    by_rows = keys_of_rows(problem, rows, block)
    by_keys = rows_of_keys(problem, rows, block)
    token = np.asarray(table.token).reshape(-1, rows)
    active = (token < queries)[..., None]
    seen = visible.mask(queries, keys)
    seen = np.ones((1, 1, 1, 1), bool) if seen is None else np.asarray(seen)
    seen = np.broadcast_to(seen[:, 0], (case.batch, queries, keys))
    batch = np.repeat(np.asarray(table.head) // case.heads, 16 // rows)
    seen = seen[batch[:, None], np.minimum(token, queries - 1)] & active
    first = np.asarray(table.first) * (16 // rows)
    for head, j in np.ndindex(*by_keys.begin.shape):
      span = slice(j * block, (j + 1) * block)
      parts = range(first[head], first[head + 1])
      # A tile's keys are one range: unless whole documents lie between its
      # rows, which these cases lack, every tile of the range is seen.
      some = [i for i in parts if seen[i, :, span].any()]
      whole = [i for i in some if (seen | ~active)[i, :, span].all()]
      begin, *whole_rows, end = (int(x[head, j]) for x in by_keys)
      self.assertEqual(some, list(range(begin, end)))
      self.assertEqual(whole, list(range(*whole_rows)))
      begin, whole_begin, whole_end, end = map(np.asarray, by_rows)
      visited = [i for i in parts if begin[i] <= j < end[i]]
      self.assertEqual(some, visited)
      if (j + 1) * block <= keys:
        visited = [i for i in parts if whole_begin[i] <= j < whole_end[i]]
        self.assertEqual(whole, visited)

  def test_segments_that_are_not_runs_hide_no_tile(self):
    segments = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32) % 2, (2, 32))
    begin, end, exact = Visible(segments=segments).key_ranges(32, 32)
    np.testing.assert_array_equal(begin, np.zeros((2, 32)))
    np.testing.assert_array_equal(end, np.full((2, 32), 32))
    self.assertFalse(exact.any())


def _ranges_of_keys(masks: str, case: _Case) -> Visible:
  """Masks by which a query sees a range of keys."""
  ends = np.array([[case.queries // 3, case.queries]] * case.batch)
  position = np.arange(case.queries)
  segments = 1 + (position >= ends[:, :1])
  if masks in ("padded", "all"):
    segments = np.where(position >= case.queries - 5, 0, segments)
  length = np.array([[case.keys], [case.keys // 2]])
  key_mask = jnp.asarray(np.arange(case.keys) < length)
  return Visible(
    key_mask if masks in ("prefix", "all") else None,
    jnp.asarray(segments, jnp.int32)
    if masks in ("segments", "padded", "all") else None,
    masks in ("causal", "all"),
  )  # fmt: skip


if __name__ == "__main__":
  absltest.main()
