"""Cases of attention, what they give in float64, and what a form gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.attention import HOPPER, TPU
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.kernels.attention import Problem, kernel_attention
from moh_jax.ops.packed import packed_attention
from moh_jax.ops.pairs import ActiveHeads, HeadBlocks, blocks_of, head_blocks
from moh_jax.ops.stock import cudnn_attention, splash_attention

_table = jax.jit(head_blocks, static_argnums=(1, 2))
KERNELS = {"mosaic_gpu": HOPPER, "mosaic_tpu": TPU}


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes, masks and a random choice of heads."""

  batch: int = 2
  queries: int = 37
  keys: int = 37
  heads: int = 4
  kv_heads: int = 4
  head_dim: int = 24
  causal: bool = False
  key_mask: bool = False
  segments: bool = False
  bias: tuple[int, int] | None = None  # sizes of its first dimensions
  hides: bool = False  # keys, by biases of -inf
  share: float = 0.5  # of active heads
  one_head: bool = False  # the same for all tokens
  scale: float | None = None
  dtype: str = "float32"

  def factor(self) -> float:
    return self.head_dim**-0.5 if self.scale is None else self.scale

  def arrays(self, dtype=None) -> list[jax.Array]:
    """Queries, keys, values, a gradient of the output, the bias if any."""
    rng = np.random.default_rng(0)
    rows, keys = (self.queries, self.heads), (self.keys, self.kv_heads)
    arrays = [
      jnp.asarray(
        rng.normal(size=(self.batch, *shape, self.head_dim)),
        dtype or self.dtype,
      )
      for shape in (rows, keys, keys, rows)
    ]
    if self.bias is None:
      return arrays
    bias = rng.normal(size=(*self.bias, self.queries, self.keys))
    if self.hides:
      bias[rng.random(bias.shape) < 0.4] = -np.inf
      bias[:, :, 3] = -np.inf  # a query without a key
    return [*arrays, jnp.asarray(bias, jnp.float32)]

  def visible(self) -> Visible:
    rng, shape = np.random.default_rng(1), (self.batch, self.keys)
    key_mask = rng.random(shape) < 0.7
    key_mask[0] = False  # nothing to see at all
    segments = np.sort(rng.integers(0, 4, shape), -1)
    return Visible(
      jnp.asarray(key_mask) if self.key_mask else None,
      jnp.asarray(segments, jnp.int32) if self.segments else None,
      self.causal,
    )

  def active(self) -> np.ndarray:
    """[B, N, H] bool; the last of several heads is nobody's."""
    shape = self.batch, self.queries, self.heads
    if self.one_head:
      return np.broadcast_to(np.arange(self.heads) == 1, shape)
    mask = np.random.default_rng(2).random(shape) < self.share
    mask[..., -1] &= self.share == 1
    return mask

  def blocks(self, rows: int = 16) -> HeadBlocks:
    active = ActiveHeads(jnp.asarray(self.active()), self.heads)
    return _table(active, rows, self.heads // self.kv_heads)

  def problem(self, rows: int = 16) -> Problem:
    shape = self.batch, self.keys, self.kv_heads, self.head_dim
    options = self.visible(), self.blocks(rows), self.factor(), True
    return Problem(shape, jnp.dtype(self.dtype), *options)


CASES = {
  "bidirectional": Case(),
  "whole_blocks": Case(queries=32, keys=32, head_dim=16),
  "causal": Case(causal=True, head_dim=80),
  "fewer_queries": Case(queries=13, causal=True, kv_heads=2),
  "fewer_keys": Case(keys=13, causal=True),
  "grouped": Case(kv_heads=1, keys=48, head_dim=80),
  "key_mask": Case(key_mask=True, kv_heads=2),
  "segments": Case(segments=True),
  "all_masks": Case(segments=True, causal=True, key_mask=True, kv_heads=2),
  "one_head": Case(one_head=True, causal=True, scale=0.3),
  "no_head": Case(share=0.0, batch=1),
  "every_head": Case(share=1.0, causal=True, kv_heads=2),
  "one_token": Case(queries=1, keys=1, batch=1, kv_heads=1),
}
# Several heads share the lanes of a TPU.
LANES = {
  "two_in_lanes": Case(head_dim=64, causal=True, key_mask=True),
  "four_in_lanes": Case(head_dim=32, segments=True),
  "grouped_in_lanes": Case(heads=8, head_dim=32, causal=True),
  "groups_of_three_in_lanes": Case(heads=6, kv_heads=2, head_dim=64),
}
BIASED = {
  "bias": Case(bias=(1, 4), kv_heads=2, causal=True, key_mask=True),
  "bias_of_examples": Case(bias=(2, 1), segments=True),
  "hiding_bias": Case(bias=(2, 4), hides=True, key_mask=True, kv_heads=2),
  "hiding_bias_of_all": Case(bias=(1, 1), hides=True, causal=True),
}


def reference(case: Case, arrays=None) -> list[np.ndarray]:
  """Output and gradients of queries, keys, values and a bias, float64."""
  arrays = case.arrays() if arrays is None else arrays
  q, k, v, grad, *bias = (np.asarray(x, np.float64) for x in arrays)
  group = case.heads // case.kv_heads
  k, v = (np.repeat(x, group, axis=2) for x in (k, v))
  logits = np.einsum("bnhd,bmhd->bhnm", q, k) * case.factor()
  seen = case.visible().mask(case.queries, case.keys)
  seen = np.ones((), bool) if seen is None else np.asarray(seen)
  seen = seen & case.active().transpose(0, 2, 1)[..., None]
  if bias:
    seen = seen & (bias[0] > -np.inf)
    logits = logits + np.maximum(bias[0], -1e9)
  highest = np.where(seen, logits, -1e300).max(-1, keepdims=True)
  weights = np.exp(np.minimum(logits - highest, 0)) * seen
  total = weights.sum(-1, keepdims=True)
  weights /= np.where(total > 0, total, 1)
  out = np.einsum("bhnm,bmhd->bnhd", weights, v)
  dv = np.einsum("bhnm,bnhd->bmhd", weights, grad)
  dweights = np.einsum("bnhd,bmhd->bhnm", grad, v)
  inner = (weights * dweights).sum(-1, keepdims=True)
  dlogits = weights * (dweights - inner)
  dq = np.einsum("bhnm,bmhd->bnhd", dlogits, k) * case.factor()
  dk = np.einsum("bhnm,bnhd->bmhd", dlogits, q) * case.factor()
  results = [out, dq]
  for x in (dk, dv):
    results.append(x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(3))
  for x in bias:
    sums = tuple(i for i, size in enumerate(x.shape) if size == 1)
    results.append(dlogits.sum(sums, keepdims=True))
  return results


def attend(form: str, case: Case, blocks, q, k, v, bias=None, **options):
  """Calls a form, with 0 for heads that are not active."""
  visible, scale = case.visible(), case.factor()
  call = Call(q, k, v, visible, scale, bias)
  chosen = jnp.asarray(case.active())
  if form == "packed":
    return packed_attention(call, blocks, 3)
  if form in KERNELS:
    options = {"interpret": True} | options
    return kernel_attention(call, blocks, KERNELS[form], **options)
  if form == "cudnn":
    out = cudnn_attention(call, "xla")
  elif form == "splash":
    out = splash_attention(call, interpret=True)
  elif form == "blocked":
    every = blocks_of(None, q.shape[:3], 8, case.heads // case.kv_heads)
    out = packed_attention(call, every)
  else:
    out = dense_attention(call)
  return jnp.where(chosen[..., None], out, 0)


def evaluate(form: str, case: Case, arrays, blocks, **options) -> list:
  """Output and gradients of a form, as `reference` orders them."""
  call = functools.partial(attend, form, case, blocks, **options)
  out, pull = jax.vjp(call, *arrays[:3], *arrays[4:])
  return [out, *pull(arrays[3].astype(out.dtype))]


results = jax.jit(evaluate, static_argnames=("form", "case", "sizes"))


def check(got, want, tolerance=2e-6, gradient_tolerance=1e-5) -> None:
  """Compares outputs and gradients."""
  for i, (a, b) in enumerate(zip(got, want, strict=True)):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    atol = (gradient_tolerance if i else tolerance) * max(np.abs(b).max(), 1)
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
