"""Attention of the active heads in one kernel, with its gradients.

The kernels read keys and values in place, and everything else as rows: the
active (token, head) pairs of `HeadBlocks`. A forward kernel may also pick its
rows out of the queries itself. Its results are kept as rows, so their size
follows the number of active heads.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import AttentionCase, Call, Form
from moh_jax.ops.basics import HALF, keep_attention
from moh_jax.ops.head_blocks import HeadBlocks, blocks_of
from moh_jax.ops.kernels.backends import (
  BACKENDS,
  block_sizes,
  kernel_options,
  pallas_backend,
)
from moh_jax.ops.kernels.problem import Problem
from moh_jax.ops.kernels.sizes import MAX_HEAD_DIM, BlockSizes
from moh_jax.ops.target import target
from moh_jax.ops.visible import Visible

_DTYPES = (*HALF, "float32")


def unable(case: AttentionCase) -> str:
  """See `Backend.unable`."""
  if case.biased:
    return "logits without a bias; 'packed' adds it"
  if case.head_dim > MAX_HEAD_DIM:
    return f"a head_dim of at most {MAX_HEAD_DIM}, not {case.head_dim}"
  if case.dtype not in _DTYPES:
    return f"one of the dtypes {', '.join(_DTYPES)}, not {case.dtype}"
  return pallas_backend(case.target, case.dtype, case.head_dim)[1]


def suits(case: AttentionCase, *, packs: bool) -> bool:
  """See `Backend.suits`; a CPU interprets kernels."""
  del packs
  return not (case.on_cpu or unable(case))


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  backend, _ = pallas_backend(case.target, case.dtype, case.head_dim)
  per_head = int(case.queries * case.share) if packs else case.queries
  sizes = block_sizes(backend, case.head_dim, case.dtype, per_head)
  return Form("kernel", packs, sizes.rows, backend=backend)


def attend(call: Call, form: Form) -> jax.Array:
  """See `Backend.attend`."""
  q, k, v = call.q, call.k, call.v
  blocks = blocks_of(call.active, q.shape[:3], form.rows)
  same = q.dtype == k.dtype == v.dtype
  options = kernel_options(target(), q.dtype.name if same else "", q.shape[-1])
  return kernel_attention(q, k, v, call.visible, blocks, call.scale, **options)


def kernel_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  visible: Visible,
  blocks: HeadBlocks,
  scale: float,
  *,
  backend: str,
  sizes: BlockSizes | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of the (token, head) pairs in a table, as one kernel.

  Sums are float32. Products of float32 inputs have the precision of
  `jax.default_matmul_precision`, as anywhere in JAX.

  Args:
    q: [B, N, H, D] bfloat16, float16 or float32.
    k: [B, M, K, D]; query head h reads key/value head h // (H / K).
    v: [B, M, K, D].
    visible: which keys a query sees.
    blocks: the active pairs. The rows of a block, R, are a power of two of at
      least 16 for "triton", 64 or 128 for "mosaic_gpu" and a multiple of 8 for
      "mosaic_tpu".
    scale: factor of the logits.
    backend: of Pallas, "triton" (NVIDIA GPUs), "mosaic_gpu" (NVIDIA Hopper,
      where it is able) or "mosaic_tpu".
    sizes: sizes of the tiles; None looks them up with `block_sizes`. Tiles are
      reduced where R is smaller than theirs.
    interpret: runs the kernels in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, N, H, D] in the dtype of v; 0 for inactive pairs and for queries that
    see no key.

  Raises:
    ValueError: the back end, a dtype or R is not supported, or a tile's rows
      do not divide R.
  """
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  chex.assert_shape(k, (q.shape[0], None, None, q.shape[3]))
  chex.assert_shape(blocks.row, q.shape[:3])
  out_dtype = v.dtype
  dtype, k, v = readable(backend, q, k, v)
  if sizes is None:
    sizes = block_sizes(backend, q.shape[-1], dtype)
  sizes = sizes.with_rows(blocks.token.shape[1])
  kernels = BACKENDS[backend]
  kernels.check(sizes)
  options = (float(scale), backend, sizes, interpret)
  k, v = (kernels.arranged(x) for x in (k.astype(dtype), v))
  out = _attend(q.astype(dtype), k, v, visible, blocks, options)
  return out.astype(out_dtype)


def readable(
  backend: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jnp.dtype, jax.Array, jax.Array]:
  """Prepares inputs for a back end's kernels; TPUs have no float16.

  Args:
    backend: of Pallas, one of `BACKENDS`.
    q: queries.
    k: keys.
    v: values.

  Returns:
    The dtype in which queries and keys are multiplied, and keys and values in
    dtypes that the back end reads: on a TPU float32 in place of float16.

  Raises:
    ValueError: no kernels exist for the back end, or they do not read a dtype.
  """
  if backend not in BACKENDS:
    raise ValueError(f"backend={backend!r} must be one of {set(BACKENDS)}")
  kernels = BACKENDS[backend]
  for name, x in {"q": q, "k": k, "v": v}.items():
    if x.dtype.name not in _DTYPES:
      known = ", ".join(_DTYPES)
      raise ValueError(f"{name} is {x.dtype.name}, must be one of {known}")
  dtype = jnp.promote_types(q.dtype, k.dtype)
  kernels.check_dtypes(dtype, v.dtype, q.shape[-1])
  return kernels.readable(dtype), *(
    x.astype(kernels.readable(x.dtype)) for x in (k, v)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, visible, blocks, options):
  return _forward(q, k, v, visible, blocks, options)[0]


# Indices in kernels are int32, also with `jax_enable_x64`.
@jax.enable_x64(False)
def _forward(q, k, v, visible, blocks, options):
  scale, backend, sizes, interpret = options
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  kernels, dim = BACKENDS[backend], q.shape[-1]
  if not kernels.picks_rows:
    q = kernels.to_rows(problem, q)
  out, log_sums = keep_attention(
    kernels.forward(problem, q, (k, v), sizes.forward)
  )
  saved = q, k, v, visible, blocks, out, log_sums
  return kernels.to_pairs(problem, out, dim), saved


@jax.enable_x64(False)
def _backward(options, saved, grad):
  scale, backend, sizes, interpret = options
  q, k, v, visible, blocks, out, log_sums = saved
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  kernels, dim = BACKENDS[backend], grad.shape[-1]
  rows = kernels.to_rows(problem, q) if kernels.picks_rows else q
  grad = kernels.to_rows(problem, grad)
  dq, inner = kernels.query_gradient(
    problem, (rows, out, log_sums, grad), (k, v), sizes.dq
  )
  dk, dv = kernels.key_gradients(
    problem, (rows, log_sums, inner, grad), (k, v), sizes.dkv
  )
  return kernels.to_pairs(problem, dq, dim), dk, dv, None, None


_attend.defvjp(_forward, _backward)
