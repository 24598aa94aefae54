"""Splash attention, interpreted, against the dense form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.ops.dense import dense_attention
from moh_jax.ops.splash import splash_attention, supports
from moh_jax.ops.visible import Visible


@dataclasses.dataclass(frozen=True)
class _Case:
  queries: int = 256
  kv_heads: int = 2
  head_dim: int = 24
  causal: bool = False
  key_mask: bool = False
  segments: bool = False
  dtype: str = "float32"

  def arrays(self) -> list[jax.Array]:
    """Queries, keys, values and a gradient of the output."""
    rng = np.random.default_rng(0)
    rows = 2, self.queries, 4, self.head_dim
    keys = 2, 256, self.kv_heads, self.head_dim
    shapes = rows, keys, keys, rows
    return [jnp.asarray(rng.normal(size=shape), self.dtype) for shape in shapes]

  def visible(self) -> Visible:
    rng = np.random.default_rng(1)
    key_mask = segments = None
    if self.key_mask:  # one text sees nothing, the other not its first keys
      key_mask = rng.random((2, 256)) < 0.5
      key_mask[0] = key_mask[1, :30] = False
      key_mask = jnp.asarray(key_mask)
    if self.segments:
      segments = np.sort(rng.integers(0, 4, (2, 256)), -1)
      segments = jnp.asarray(segments, jnp.int32)
    return Visible(key_mask, segments, self.causal)


@functools.partial(jax.jit, static_argnames=("case", "form"))
def _run(case, arrays, *, form):
  def attend(q, k, v):
    if form == "dense":
      return dense_attention(q, k, v, None, case.visible(), 0.3)
    return splash_attention(q, k, v, case.visible(), 0.3, interpret=True)

  out, pull = jax.vjp(attend, *arrays[:3])
  return out, *pull(arrays[3])


class SplashTest(parameterized.TestCase):
  @parameterized.parameters(
    {},
    {"causal": True, "key_mask": True, "segments": True},
    {"causal": True, "key_mask": True, "queries": 128, "kv_heads": 1},
    {"causal": True, "dtype": "bfloat16", "kv_heads": 4, "head_dim": 64},
    {"causal": True, "key_mask": True, "kv_heads": 4, "head_dim": 32},
    {"kv_heads": 2, "head_dim": 64},
  )
  def test_equals_the_dense_form(self, **options):
    case = _Case(**options)
    got, want = (
      _run(case, case.arrays(), form=form) for form in ("splash", "dense")
    )
    exact = case.dtype == "float32"
    for i, (x, y) in enumerate(zip(got, want)):
      self.assertEqual(x.dtype, y.dtype)
      x, y = (np.asarray(z, np.float32) for z in (x, y))
      tolerance = (1e-5 if i else 2e-6) if exact else 2e-2
      most = max(1, np.abs(y).max())
      np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * most)

  @parameterized.parameters(
    ((4096, 4096, 64), {}, True),
    ((128, 256, 256), {"causal": True}, True),
    ((256, 128, 64), {"causal": True}, False),
    ((256, 128, 64), {}, True),
    ((196, 196, 64), {}, False),
    ((256, 256, 320), {}, False),
    ((256, 256, 64, "float16"), {}, False),
    ((256, 256, 64), {"biased": True}, False),
  )
  def test_supports(self, shape, options, expected):
    self.assertEqual(supports(*shape, **options), expected)

  def test_other_calls_are_named(self):
    q = jnp.zeros((1, 100, 2, 8))
    with self.assertRaisesRegex(ValueError, "queries=100.* multiples of 128"):
      splash_attention(q, q, q, Visible(), 1.0)


if __name__ == "__main__":
  absltest.main()
