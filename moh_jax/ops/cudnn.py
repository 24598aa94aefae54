"""Attention of every head through cuDNN's fused kernels.

It skips no inactive heads: told the lengths of their queries, cuDNN takes as
long in the forward pass for half of them as for all, and what its backward pass
skips makes it no faster than the kernel (measured on an H100).

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim.
"""

import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import AttentionCase, Call, Form, Visible
from moh_jax.ops.basics import HALF
from moh_jax.ops.head_blocks import ActiveHeads, gather_rows, sequence_rows

# Largest head dim that cuDNN's fused attention has gradients for everywhere.
_HEAD_DIM = 128


def unable(case: AttentionCase) -> str:
  """See `Backend.unable`."""
  if problem := case.target.gpu_problem:
    return problem
  if not case.has_cudnn:
    return "JAX's plug-in for CUDA, which is not installed"
  if case.dtype not in HALF:
    return f"model.dtype bfloat16 or float16, not {case.dtype}"
  if case.head_dim % 8:
    return f"a head_dim that is a multiple of 8, not {case.head_dim}"
  if case.head_dim > _HEAD_DIM:
    return f"a head_dim of at most {_HEAD_DIM}, not {case.head_dim}"
  if case.checked:
    return case.check_problem
  if case.biased and (case.queries % 2 or case.keys % 2):
    # Its gradients exist for even numbers alone.
    sizes = f"{case.queries} and {case.keys}"
    return f"even numbers of queries and keys beside a bias, not {sizes}"
  return ""


def suits(case: AttentionCase, *, packs: bool) -> bool:
  """See `Backend.suits`: it would read masks as one array [B, N, M]."""
  return not (packs or case.masked or unable(case))


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  del case, packs
  return Form("cudnn")


def attend(call: Call, form: Form, backend: str = "cudnn") -> jax.Array:
  """Softmax attention by `jax.nn.dot_product_attention`.

  Args:
    call: arrays, bfloat16 or float16 for cuDNN.
    form: as in `Backend.attend`.
    backend: "cudnn", or "xla" for tests without a GPU.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for queries that see no key.
  """
  compute = functools.partial(
    jax.nn.dot_product_attention, scale=call.scale, implementation=backend
  )
  q, k, v, bias, visible = call.q, call.k, call.v, call.bias, call.visible
  if bias is None and not visible.causal and visible.segments is None:
    return _bidirectional(q, k, v, visible.key_mask, compute)
  causal = visible.causal and q.shape[1] == k.shape[1]
  if causal:  # cuDNN applies this mask itself and skips hidden tiles
    visible = Visible(visible.key_mask, visible.segments)
  sizes = q.shape[1], k.shape[1]
  mask = visible.mask(*sizes)
  if bias is not None:
    # cuDNN makes NaN of rows that are all -inf, and gradients that are NaN of
    # a float32 bias beside 16-bit queries (jax-ml/jax#32242).
    bias = bias.astype(q.dtype)
    seen = bias != -jnp.inf
    bias = jnp.where(seen, bias, 0)
    mask = seen if mask is None else mask & seen
  # It broadcasts examples and heads alone (jax-ml/jax#28974).
  bias, mask = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (*x.shape[:2], *sizes)), (bias, mask)
  )
  out = compute(q, k, v, bias=bias, mask=mask, is_causal=causal)
  if mask is None:
    return out
  if causal:
    mask = mask & jnp.tri(q.shape[1], dtype=bool)[None, None]
  seen = mask.any(-1).swapaxes(1, 2)[..., None]  # 1 where sizes may be 1
  return jnp.where(seen, out, 0)


def _bidirectional(q, k, v, key_mask, compute):
  """Moves keys that are not seen behind the others and tells their number."""
  if key_mask is None:
    return compute(q, k, v)
  front, keys = sequence_rows(ActiveHeads(key_mask[:, :, None], 1))
  k, v = (gather_rows(x[:, :, None], front).reshape(x.shape) for x in (k, v))
  # Not every version of cuDNN takes a length of 0: that needs 9.25.
  out = compute(q, k, v, key_value_seq_lengths=jnp.maximum(keys, 1))
  return jnp.where((keys > 0)[:, None, None, None], out, 0)
