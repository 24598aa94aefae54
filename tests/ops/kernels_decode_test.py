"""One new token and a cache: the kernels against NumPy, and that they lower."""

import dataclasses
import functools
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.ops.kernels.attention import kernel_decode
from tests.ops import devices
from tests.ops.decode_cases import BACKENDS, CASES, INT8, Case, small_tiles


def _reference(case: Case, q, cache) -> np.ndarray:
  q, k, v = (np.asarray(x, np.float64) for x in (q, cache.k, cache.v))
  if cache.k_scale is not None:
    k, v = k * cache.k_scale.mT, v * cache.v_scale.mT
  k, v = (np.repeat(x, case.heads // case.kv_heads, axis=1) for x in (k, v))
  logits = np.einsum("bnhd,bhmd->bhnm", q, k) * case.factor()
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights *= case.visible()[:, None, None]
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total > 0, total, 1)
  out = np.einsum("bhnm,bhmd->bnhd", weights, v)
  active = case.active()
  return out if active is None else out * np.asarray(active.mask)[..., None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _kernel(case, backend, q, cache):
  devices.need(backend)
  with small_tiles():
    return kernel_decode(
      q, cache, *case.bounds(), case.active(), case.factor(), backend=backend,
      interpret=True,
    )  # fmt: skip


class InterpretedTest(parameterized.TestCase):
  @parameterized.product(name=list(CASES), backend=BACKENDS)
  def test_equals_numpy(self, name, backend):
    case = CASES[name]
    arrays = case.arrays()
    out = _kernel(case, backend, *arrays)
    np.testing.assert_allclose(out, _reference(case, *arrays), atol=2e-6)

  @parameterized.product(
    dtypes=(
      (jnp.bfloat16, jnp.bfloat16, 1e-2),
      (jnp.float16, jnp.float16, 2e-3),
      # The wider of both: nothing is rounded but the result.
      (jnp.bfloat16, jnp.float32, 1e-2),
      (jnp.float32, jnp.bfloat16, 2e-6),
      (jnp.float32, jnp.float16, 2e-6),
      (jnp.float16, jnp.bfloat16, 2e-3),
      (jnp.float32, INT8, 2e-6),
      (jnp.bfloat16, INT8, 1e-2),
    ),
    backend=BACKENDS,
  )
  def test_dtypes(self, dtypes, backend):
    case = CASES["grouped"]
    dtype, cache_dtype, atol = dtypes
    arrays = case.arrays(dtype, cache_dtype)
    out = _kernel(case, backend, *arrays)
    chex.assert_type(out, dtype)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, _reference(case, *arrays), atol=atol)

  @parameterized.product(
    name=("many_splits", "hidden_text", "few"),
    dtype=(jnp.float32, INT8),
    backend=BACKENDS,
  )
  def test_what_is_not_seen_may_be_anything(self, name, dtype, backend):
    case = {**CASES, "few": Case(heads=6, kv_heads=6, choice="few")}[name]
    q, cache = case.arrays(cache_dtype=dtype)
    read = case.is_read()[..., None] & case.visible()[:, None]  # [B, K, M]
    self.assertFalse(read.all())

    def spoil(x: jax.Array) -> jax.Array:
      own = read[..., None] if x.shape[2] > 1 else read[:, :, None]
      return jnp.where(own, x, -128 if x.dtype == jnp.int8 else jnp.nan)

    out = _kernel(case, backend, q, jax.tree.map(spoil, cache))
    chex.assert_trees_all_equal(out, _kernel(case, backend, q, cache))
    np.testing.assert_allclose(out, _reference(case, q, cache), atol=2e-6)


class SimulatedTest(parameterized.TestCase):
  """Two cores, whose memory holds NaN where nothing was written."""

  @parameterized.parameters(
    "padding", "many_splits", "hidden_text", "first_text_chose_nothing",
    "grouped", "no_head", "one_slot",
  )  # fmt: skip
  @pytest.mark.slow
  def test_equals_numpy_without_races(self, name):
    case = CASES[name]
    arrays = case.arrays()
    with devices.simulated_tpu(2):
      call = functools.partial(_kernel.__wrapped__, case, "mosaic_tpu")
      out = jax.block_until_ready(jax.jit(call)(*arrays))
    np.testing.assert_allclose(out, _reference(case, *arrays), atol=2e-6)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"backend": "npu"}, "backend='npu' .*'triton'"),
    ({"dtype": jnp.int32}, "q is int32, .* bfloat16"),
    ({"head_dim": 320}, "head_dim=320 .* at most 256"),
  )
  def test_what_is_wrong_is_named(self, options, message):
    options = {"backend": "mosaic_tpu", "dtype": jnp.float32, **options}
    case = Case(head_dim=options.get("head_dim", 24))
    q, cache = case.arrays(options["dtype"])
    with self.assertRaisesRegex(ValueError, message):
      kernel_decode(
        q, cache, *case.bounds(), None, 1.0, interpret=True,
        backend=options["backend"],
      )  # fmt: skip


# What a back end is called when lowering, and a kernel in what is lowered.
_TARGETS = {
  "triton": ("cuda", "__gpu$xla.gpu.triton"),
  "mosaic_tpu": ("tpu", "@tpu_custom_call"),
}
# Of queries and cache.
_DTYPES = (
  (jnp.bfloat16, jnp.bfloat16),
  (jnp.float32, jnp.bfloat16),
  (jnp.bfloat16, INT8),
)
_SHAPES = ((5120, 128), (1100, 80), (20, 64))


class LoweringTest(parameterized.TestCase):
  """What a machine without the device can check: that kernels lower."""

  @parameterized.product(dtypes=_DTYPES, shape=_SHAPES, backend=BACKENDS)
  def test_lowers_and_copies_no_cache(self, dtypes, shape, backend):
    devices.need(backend, lowers=True)
    target, kernel = _TARGETS[backend]
    slots, head_dim = shape
    case = Case(heads=16, kv_heads=8, slots=slots, head_dim=head_dim)
    case = dataclasses.replace(case, seen=((0, slots),) * 4)

    def call(q, cache, bounds, active):
      return kernel_decode(q, cache, *bounds, active, 1.0, backend=backend)

    with devices.as_if_on_a_gpu():
      shapes = jax.eval_shape(
        lambda: (*case.arrays(*dtypes), case.bounds(), case.active())
      )
      traced = jax.jit(call).trace(*shapes)
      text = traced.lower(lowering_platforms=(target,)).as_text()
    self.assertEqual(text.count(kernel), 1)
    large = {
      equation.primitive.name
      for equation in traced.jaxpr.eqns
      for out in equation.outvars
      if out.aval.size >= shapes[1].k.size
    }
    kept = {"reshape", "squeeze"}
    if backend == "mosaic_tpu":
      # Another order of the dimensions is one that a TPU stores them in.
      kept |= {"transpose", "with_memory_space_constraint"}
    self.assertEqual(large - kept, set())


class DeviceTest(parameterized.TestCase):
  @parameterized.product(name=list(CASES), dtype=(jnp.float32, INT8))
  @unittest.skipUnless(devices.BACKEND, "there is no GPU or TPU")
  def test_on_this_gpu_or_tpu_equals_numpy(self, name, dtype):
    case = CASES[name]
    arrays = case.arrays(cache_dtype=dtype)

    @jax.jit
    def attend(q, cache):
      return kernel_decode(
        q, cache, *case.bounds(), case.active(), case.factor(),
        backend=devices.BACKEND,
      )  # fmt: skip

    with jax.default_matmul_precision("highest"):
      out = attend(*arrays)
    np.testing.assert_allclose(out, _reference(case, *arrays), atol=1e-4)


if __name__ == "__main__":
  absltest.main()
