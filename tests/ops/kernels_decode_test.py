"""One new token and a cache: the kernels against NumPy, and that they lower."""

import dataclasses
import functools
import unittest
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.ops.head_blocks import ActiveHeads, head_blocks
from moh_jax.ops.kernels import decode
from moh_jax.ops.kernels.attention import BACKENDS
from moh_jax.ops.kernels.decode import decode_splits, kernel_decode
from moh_jax.ops.kernels.sizes import decode_tile
from tests.ops import devices

_BACKENDS = ("triton", "mosaic_tpu")


@dataclasses.dataclass(frozen=True)
class _Case:
  """Shapes, what is visible, and which heads are active."""

  batch: int = 2
  heads: int = 4
  kv_heads: int = 4
  slots: int = 40
  head_dim: int = 24
  splits: int | None = None
  choice: str = "random"  # of heads
  hidden: str = "padding"
  scale: float | None = None

  def factor(self) -> float:
    return self.head_dim**-0.5 if self.scale is None else self.scale

  def arrays(self, dtype=jnp.float32, cache_dtype=None) -> list[jax.Array]:
    """Queries, keys and values."""
    rng = np.random.default_rng(0)
    stored = self.batch, self.kv_heads, self.slots, self.head_dim
    q = rng.normal(size=(self.batch, 1, self.heads, self.head_dim))
    k, v = rng.normal(size=(2, *stored))
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    return [
      jnp.asarray(q, dtype),
      *(jnp.asarray(x, cache_dtype) for x in (k, v)),
    ]

  def visible(self) -> jax.Array:
    """[B, 1, M]: texts begin, and end, somewhere."""
    visible = np.zeros((self.batch, 1, self.slots), bool)
    visible[:, :, : self.slots - 3] = True
    if self.hidden == "padding":
      visible[0, :, : self.slots // 3] = False
    elif self.hidden == "parts":  # all of the first ones and of the last
      visible[0] = False
      visible[0, :, self.slots // 2 : self.slots // 2 + 3] = True
    elif self.hidden == "text":
      visible[0] = False
    return jnp.asarray(visible)

  def active(self) -> ActiveHeads | None:
    if self.choice == "no table":
      return None
    shape = self.batch, 1, self.heads
    mask = np.zeros(shape, bool)
    if self.choice == "random":
      mask = np.random.default_rng(2).random(shape) < 0.5
      mask[..., -1] = False  # one head that nobody chose
    elif self.choice == "one head":
      mask[..., 1] = True
    elif self.choice == "few":
      mask[0, :, :2] = mask[1, :, 4] = True
    elif self.choice == "all":
      mask[...] = True
    return ActiveHeads(jnp.asarray(mask), self.heads)


_CASES = {
  "padding": _Case(),
  "parts": _Case(splits=5, head_dim=64, hidden="parts"),
  "one_slot_a_part": _Case(slots=6, splits=6, head_dim=16, hidden="parts"),
  "hidden_text": _Case(splits=2, hidden="text"),
  "grouped": _Case(heads=6, kv_heads=2, head_dim=80, splits=4),
  "many_queries_of_a_head": _Case(heads=70, kv_heads=1, batch=1, slots=16),
  "many_queries_of_a_wide_head": _Case(
    heads=18, kv_heads=1, batch=1, slots=16, head_dim=136
  ),
  "one_head": _Case(choice="one head", scale=-0.3, slots=37),
  "no_head": _Case(choice="none", splits=2),
  "all_heads": _Case(choice="all", slots=160, head_dim=128, kv_heads=2),
  "no_table": _Case(choice="no table", splits=2),
}


def _reference(case: _Case, arrays) -> np.ndarray:
  q, k, v = (np.asarray(x, np.float64) for x in arrays)
  k, v = (np.repeat(x, case.heads // case.kv_heads, axis=1) for x in (k, v))
  logits = np.einsum("bnhd,bhmd->bhnm", q, k) * case.factor()
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights *= np.asarray(case.visible())[:, None]
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total > 0, total, 1)
  out = np.einsum("bhnm,bhmd->bnhd", weights, v)
  active = case.active()
  return out if active is None else out * np.asarray(active.mask)[..., None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernel(case, backend, q, k, v):
  return kernel_decode(
    q, k, v, case.visible(), case.active(), case.factor(), backend=backend,
    splits=case.splits, interpret=True,
  )  # fmt: skip


class InterpretedTest(parameterized.TestCase):
  @parameterized.product(name=list(_CASES), backend=_BACKENDS)
  def test_equals_numpy(self, name, backend):
    case = _CASES[name]
    arrays = case.arrays()
    out = _kernel(case, backend, *arrays)
    np.testing.assert_allclose(out, _reference(case, arrays), atol=2e-6)

  @parameterized.product(
    dtypes=(
      (jnp.bfloat16, jnp.bfloat16, 1e-2),
      (jnp.float16, jnp.float16, 2e-3),
      # The wider of both: nothing is rounded but the result.
      (jnp.bfloat16, jnp.float32, 1e-2),
      (jnp.float32, jnp.bfloat16, 2e-6),
      (jnp.float32, jnp.float16, 2e-6),
      (jnp.float16, jnp.bfloat16, 2e-3),
    ),
    backend=_BACKENDS,
  )
  def test_dtypes(self, dtypes, backend):
    case = _CASES["grouped"]
    dtype, cache_dtype, atol = dtypes
    arrays = case.arrays(dtype, cache_dtype)
    out = _kernel(case, backend, *arrays)
    chex.assert_type(out, dtype)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, _reference(case, arrays), atol=atol)

  @parameterized.product(kv_heads=(6, 3), backend=_BACKENDS)
  def test_heads_that_nobody_chose_are_not_read(self, kv_heads, backend):
    case = _Case(heads=6, kv_heads=kv_heads, splits=2, choice="few")
    q, k, v = arrays = case.arrays()
    mask = np.asarray(case.active().mask)
    is_read = mask.reshape(case.batch, kv_heads, -1).any(-1)
    self.assertEqual(is_read.sum(), 3 if kv_heads == 6 else 2)
    k, v = (jnp.where(is_read[..., None, None], x, jnp.nan) for x in (k, v))
    kernels = BACKENDS[backend]
    with mock.patch.object(kernels, "forward", wraps=kernels.forward) as spy:
      out = kernel_decode(
        q, k, v, case.visible(), case.active(), case.factor(),
        backend=backend, splits=case.splits, interpret=True,
      )  # fmt: skip
    blocks = spy.call_args.args[0].blocks
    parts = np.flatnonzero(np.repeat(is_read, case.splits))
    np.testing.assert_array_equal(blocks.head[: blocks.first[-1]], parts)
    np.testing.assert_allclose(out, _reference(case, arrays), atol=2e-6)

  @parameterized.parameters(*_BACKENDS)
  def test_parts_change_nothing(self, backend):
    case = _Case(batch=1, heads=2, kv_heads=2, slots=24, head_dim=16)
    arrays = case.arrays()
    for splits in (1, 3, 8):
      parts = dataclasses.replace(case, splits=splits)
      out = _kernel(parts, backend, *arrays)
      np.testing.assert_allclose(out, _reference(case, arrays), atol=2e-6)


class ErrorsTest(absltest.TestCase):
  def _call(self, case=_CASES["padding"], dtype=jnp.float32, **options):
    options = {"backend": "triton", **options}
    kernel_decode(
      *case.arrays(dtype), case.visible(), None, 1.0, interpret=True, **options
    )

  def test_unknown_backend_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "backend='npu' .*'triton'"):
      self._call(backend="npu")

  def test_int8_is_not_read(self):
    with self.assertRaisesRegex(ValueError, "q is int8, .* bfloat16"):
      self._call(dtype=jnp.int8)

  def test_parts_must_divide_the_slots(self):
    with self.assertRaisesRegex(ValueError, "splits=3 must divide the 40 sl"):
      self._call(splits=3)

  def test_too_large_head_dim(self):
    with self.assertRaisesRegex(ValueError, "head_dim=320 .* at most 256"):
      self._call(_Case(head_dim=320))


class PlanTest(parameterized.TestCase):
  @given(st.integers(1, 700), st.integers(1, 20_000))
  def test_parts_divide_the_slots_and_are_not_small(self, heads, slots):
    splits = decode_splits(heads, slots)
    self.assertEqual(slots % splits, 0)
    if splits > 1:
      self.assertGreaterEqual(slots // splits, 256)
      self.assertLessEqual(heads * splits, 512)

  @parameterized.parameters(
    (16, 4096, 16), (128, 4096, 4), (8 * 24, 4096, 2), (8 * 32, 4096, 2),
    (257, 4096, 1), (6, 7168, 28), (6, 1280, 5), (6, 448, 1), (6, 4099, 1),
  )  # fmt: skip
  def test_parts_fill_a_gpu(self, heads, slots, expected):
    self.assertEqual(decode_splits(heads, slots), expected)

  @parameterized.parameters(
    (320, 320), (37, 37), (2048, 2048), (4096, 2048), (5120, 1280),
    (7168, 1792), (5000, 2048),
  )  # fmt: skip
  def test_tiles_of_a_tpu_divide_the_slots(self, slots, expected):
    tile = decode_tile("mosaic_tpu", 64, jnp.bfloat16)
    self.assertEqual(decode._without_padding(tile, slots).keys, expected)

  @parameterized.product(
    head_dim=((64, 64), (128, 64), (136, 16), (256, 16)), backend=_BACKENDS
  )
  def test_blocks_of_wide_heads_have_few_rows(self, head_dim, backend):
    dim, rows = head_dim
    case = _Case(batch=1, heads=70, kv_heads=1, slots=16, head_dim=dim)
    kernels = BACKENDS[backend]
    with mock.patch.object(kernels, "forward", wraps=kernels.forward) as spy:
      jax.eval_shape(functools.partial(_kernel, case, backend), *case.arrays())
    problem, tile = spy.call_args.args[0], spy.call_args.args[-1]
    self.assertEqual((problem.rows, tile.rows), (rows, rows))

  @parameterized.product(tokens=(1, 3, 16, 40), choice=(0.0, 0.5, 1.0))
  def test_table_is_that_of_all_tokens_of_some_heads(self, tokens, choice):
    active = jnp.asarray(np.random.default_rng(0).random(7) < choice)
    mask = jnp.broadcast_to(active[:, None, None], (7, tokens, 1))
    expected = head_blocks(ActiveHeads(mask, 1), 16)
    table = decode._whole_heads(active, tokens, 16)
    chex.assert_trees_all_equal(table, expected)


def _traced(backend, dtypes, slots, head_dim, sharding=None):
  """For a device, with the tiles and parts that it gets."""
  case = _Case(batch=4, heads=16, kv_heads=8, slots=slots, head_dim=head_dim)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(
      lambda: (*case.arrays(*dtypes), case.visible(), case.active())
    ),
  )

  def call(q, k, v, visible, active):
    return kernel_decode(q, k, v, visible, active, 1.0, backend=backend)

  return jax.jit(call).trace(*shapes), shapes[1].size


# What a backend is called when lowering, and a kernel in what is lowered.
_TARGETS = {
  "triton": ("cuda", "__gpu$xla.gpu.triton"),
  "mosaic_tpu": ("tpu", "@tpu_custom_call"),
}
# Of queries and cache.
_DTYPES = (
  (jnp.bfloat16, jnp.bfloat16),
  (jnp.float32, jnp.float32),
  (jnp.float32, jnp.bfloat16),
)
_SHAPES = (
  (320, 64), (1280, 64), (5120, 128), (2048, 80), (20, 64), (28, 128),
)  # fmt: skip


class LoweringTest(parameterized.TestCase):
  """What a machine without the device can check: that kernels lower."""

  @parameterized.product(dtypes=_DTYPES, shape=_SHAPES, backend=_BACKENDS)
  def test_lowers_and_copies_no_cache(self, dtypes, shape, backend):
    target, kernel = _TARGETS[backend]
    with devices.as_if_on_a_gpu():
      traced, size = _traced(backend, dtypes, *shape)
      text = traced.lower(lowering_platforms=(target,)).as_text()
    self.assertEqual(text.count(kernel), 1)
    large = {
      equation.primitive.name
      for equation in traced.jaxpr.eqns
      for out in equation.outvars
      if out.aval.size >= size
    }
    # Another order of the dimensions is one that a TPU stores them in.
    kept = {"reshape", "squeeze"} | (
      {"transpose"} if backend == "mosaic_tpu" else set()
    )
    self.assertEqual(large - kept, set())

  @parameterized.product(topology=("v5e:2x2", "v6e:2x2"), shape=_SHAPES)
  @unittest.skipUnless(devices.HAS_LIBTPU, "libtpu is not installed")
  def test_compiles_for_a_tpu_without_a_copy_of_the_cache(
    self, topology, shape
  ):
    with devices.tpu(topology) as one:
      for dtypes in _DTYPES:
        traced, size = _traced("mosaic_tpu", dtypes, *shape, sharding=one)
        memory = traced.lower().compile().memory_analysis()
        self.assertLess(memory.temp_size_in_bytes, size)


class DeviceTest(parameterized.TestCase):
  @parameterized.parameters(*_CASES)
  @unittest.skipUnless(devices.BACKEND, "there is no GPU or TPU")
  def test_on_this_gpu_or_tpu_equals_numpy(self, name):
    case = _CASES[name]
    arrays = case.arrays()

    @jax.jit
    def attend(q, k, v):
      return kernel_decode(
        q, k, v, case.visible(), case.active(), case.factor(),
        backend=devices.BACKEND, splits=case.splits,
      )  # fmt: skip

    with jax.default_matmul_precision("highest"):
      out = attend(*arrays)
    np.testing.assert_allclose(out, _reference(case, arrays), atol=1e-4)


if __name__ == "__main__":
  absltest.main()
