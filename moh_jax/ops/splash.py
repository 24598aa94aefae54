"""Attention of all heads on TPUs, by JAX's splash attention kernel.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from moh_jax.ops.attention_forms import AttentionCase, Call, Form, Visible
from moh_jax.ops.basics import ATTENTION
from moh_jax.ops.head_layout import LANES, fill_lanes, heads_in_lanes, in_place

_BLOCK = 512  # queries, and keys, of a tile at most
_DTYPES = ("bfloat16", "float32")
_MAX_HEAD_DIM = 256


def unable(case: AttentionCase) -> str:
  """See `Backend.unable`."""
  if case.target.platform != "tpu":
    return f"a TPU, this is a {case.target.platform}"
  if jax.config.jax_enable_x64:
    return "no jax_enable_x64: its gradients mix int32 and int64"
  if case.checked:
    return case.check_problem
  if case.biased:
    return "logits without a bias"
  if case.dtype not in _DTYPES:
    return f"one of the dtypes {_DTYPES}, not {case.dtype}"
  if case.head_dim > _MAX_HEAD_DIM:
    return f"a head_dim of at most {_MAX_HEAD_DIM}, not {case.head_dim}"
  sizes = case.queries, case.keys
  if any(x % LANES for x in sizes) or (case.causal and sizes[0] > sizes[1]):
    return f"lengths that are multiples of {LANES}, and enough keys: {sizes}"
  return ""


def suits(case: AttentionCase, *, packs: bool) -> bool:
  """See `Backend.suits`."""
  return not packs and not unable(case)


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  return Form("splash")


def attend(call: Call, form: Form, interpret: bool = False) -> jax.Array:
  """Softmax attention of every head; tiles that no query sees are skipped.

  Args:
    call: arrays, bfloat16 or float32; N and M are multiples of 128.
    form: as in `Backend.attend`.
    interpret: runs the kernel in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  q, k, v, visible = call.q, call.k, call.v, call.visible
  queries, heads, dim = q.shape[1:]
  keys = k.shape[1]
  mask = masks.FullMask((queries, keys))
  if visible.causal:
    mask = masks.CausalMask((queries, keys), offset=keys - queries)
  tile = _largest_block(queries), _largest_block(keys)
  names = "q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq"
  sizes = {f"block_{name}": size for name, size in zip(names, tile * 3)}
  kernel = splash.make_splash_mha_single_device(
    masks.MultiHeadMask([mask] * heads),
    block_sizes=splash.BlockSizes(**sizes),
    residual_checkpoint_name=ATTENTION,
    interpret=interpret,
  )
  # The kernel has no scale. In bfloat16 only powers of two multiply exactly.
  q = (q.astype(jnp.float32) * call.scale).astype(q.dtype)
  count = heads_in_lanes(heads, dim) if heads == k.shape[2] else 1
  q, k, v = (fill_lanes(x, count).swapaxes(1, 2) for x in (q, k, v))
  own = in_place(jnp.arange(count).reshape(1, 1, -1, 1), count, dim)
  if count > 1:
    # A head's other lanes are 0, so the m key heads of a set are read as one;
    # with fewer lanes no less would be computed.
    q = jnp.where(own, q[:, :, None], jnp.zeros((), q.dtype))
    q = q.reshape(len(q), -1, *q.shape[3:])
  out = jax.vmap(kernel)(q, k, v, _segment_ids(queries, keys, visible))
  if count > 1:
    out = out.reshape(len(out), -1, count, *out.shape[2:])
    out = jnp.where(own, out, jnp.zeros((), out.dtype)).sum(2)
  out = out.swapaxes(1, 2).reshape(*call.q.shape).astype(v.dtype)
  if visible.key_mask is None:
    return out
  seen = visible.mask(queries, keys).any(-1)  # [B, 1, N or 1]
  return jnp.where(seen.swapaxes(1, 2)[..., None], out, 0)


def _segment_ids(
  queries: int, keys: int, visible: Visible
) -> splash.SegmentIds | None:
  """Hides keys by their ids: a query sees the keys with its own."""
  key_mask, segments = visible.key_mask, visible.segments
  if key_mask is None and segments is None:
    return None
  if segments is None:
    ids = jnp.zeros((len(key_mask), keys), jnp.int32)
    of_queries = jnp.zeros((len(key_mask), queries), jnp.int32)
  else:
    ids = of_queries = segments.astype(jnp.int32)
  if key_mask is not None:
    ids = jnp.where(key_mask, ids, jnp.iinfo(jnp.int32).min)
  return splash.SegmentIds(of_queries, ids)


def _largest_block(size: int) -> int:
  """The largest multiple of 128 up to the limit that divides a length."""
  blocks = range(LANES, min(size, _BLOCK) + 1, LANES)
  return max(x for x in blocks if size % x == 0)
