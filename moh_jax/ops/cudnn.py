"""Attention through cuDNN's fused kernels, of the active heads where it can.

Without a causal mask, segments and a bias neither the order of queries nor that
of keys matters. So the queries of the heads that share a key/value head become
one sequence, which holds the active (token, head) pairs, and keys that may not
be seen are moved behind the others; cuDNN is told both lengths. A causal mask
of cuDNN's counts queries by their index in that sequence, which is not their
token's position, so causal attention computes all heads instead.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, G query
heads of a key/value head, D head dim.
"""

import functools

import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import AttentionCase, Call, Form, Visible
from moh_jax.ops.basics import HALF
from moh_jax.ops.head_blocks import (
  ActiveHeads,
  gather_rows,
  scatter_rows,
  sequence_rows,
)

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
  if case.masked or (packs and _hides(case)):
    return False
  return not unable(case)


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  return Form("cudnn", packs and not _hides(case), backend="cudnn")


def _hides(case: AttentionCase) -> bool:
  """Whether the rows of a head cannot be a sequence of their own."""
  return case.causal or case.masked or case.biased


def attend(call: Call, form: Form, backend: str = "cudnn") -> jax.Array:
  """Softmax attention by `jax.nn.dot_product_attention`.

  Args:
    call: arrays, bfloat16 or float16 for cuDNN. With a bias, segments or a
      causal mask all heads are computed.
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
    return _bidirectional(q, k, v, visible.key_mask, call.active, compute)
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


def _bidirectional(q, k, v, key_mask, active, compute):
  queries = keys = table = None  # lengths of cuDNN's sequences, and their rows
  if key_mask is not None:
    front, keys = sequence_rows(ActiveHeads(key_mask[:, :, None], 1))
    k, v = (gather_rows(x[:, :, None], front).reshape(x.shape) for x in (k, v))
  if active is not None:
    heads = k.shape[2]
    table, queries = sequence_rows(active, q.shape[2] // heads)
    q = gather_rows(q, table).reshape(len(queries), -1, 1, q.shape[3])
    k, v = (
      x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3]) for x in (k, v)
    )
    keys = None if keys is None else jnp.repeat(keys, heads)
  out = compute(
    q,
    k,
    v,
    query_seq_lengths=_at_least_one(queries),
    key_value_seq_lengths=_at_least_one(keys),
  )
  if keys is not None:
    out = jnp.where((keys > 0)[:, None, None, None], out, 0)
  if table is None:
    return out
  return scatter_rows(out.reshape(-1, out.shape[-1]), table)


def _at_least_one(lengths: jax.Array | None) -> jax.Array | None:
  """Lengths that every version of cuDNN takes: 0 needs cuDNN 9.25.

  The first row or key of an empty sequence is 0, and nobody reads the result.
  """
  return None if lengths is None else jnp.maximum(lengths, 1)
