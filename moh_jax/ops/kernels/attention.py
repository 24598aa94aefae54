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

from moh_jax.ops.head_blocks import HeadBlocks, gather_rows, scatter_rows
from moh_jax.ops.kernels import hopper, tpu, triton
from moh_jax.ops.kernels.problem import Kernels, Problem
from moh_jax.ops.kernels.sizes import BlockSizes, block_sizes
from moh_jax.ops.lanes import fill_lanes, heads_in_lanes
from moh_jax.ops.remat import keep_attention
from moh_jax.ops.visible import Visible

# By the name of Pallas's own back end.
BACKENDS: dict[str, Kernels] = {
  "triton": triton,
  "mosaic_gpu": hopper,
  "mosaic_tpu": tpu,
}
# Back ends whose forward kernel picks rows out of [B, N, H, D] itself: there is
# no pass over the queries before it.
_PICKS_ROWS = ("triton",)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


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
      where `hopper.supports` the arrays) or "mosaic_tpu".
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
  rows = blocks.token.shape[1]
  BACKENDS[backend].check_rows(rows)
  if sizes is None:
    sizes = block_sizes(backend, q.shape[-1], dtype)
  sizes = sizes.with_rows(rows)
  sizes.check(backend)
  options = (float(scale), backend, sizes, interpret)
  k, v = (arranged_keys(backend, x) for x in (k.astype(dtype), v))
  out = _attend(q.astype(dtype), k, v, visible, blocks, options)
  return out.astype(out_dtype)


def readable(
  backend: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jnp.dtype, jax.Array, jax.Array]:
  """Prepares inputs for a back end's kernels; TPUs have no float16.

  Args:
    backend: of Pallas, "triton", "mosaic_gpu" or "mosaic_tpu".
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
  if backend == "triton" and triton.MISSING:
    raise ValueError(f"backend='triton' needs {triton.MISSING}")
  for name, x in {"q": q, "k": k, "v": v}.items():
    if x.dtype not in _DTYPES:
      known = ", ".join(jnp.dtype(x).name for x in _DTYPES)
      raise ValueError(f"{name} is {x.dtype.name}, must be one of {known}")
  dtype = jnp.promote_types(q.dtype, k.dtype)
  if backend == "mosaic_gpu":
    hopper.check(dtype, v.dtype, q.shape[-1])
  if backend != "mosaic_tpu":
    return dtype, k, v

  def widened(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype

  return widened(dtype), *(x.astype(widened(x.dtype)) for x in (k, v))


def arranged_keys(backend: str, x: jax.Array) -> jax.Array:
  """Keys or values as a back end's kernels read them.

  Args:
    backend: of Pallas.
    x: [B, M, K, D].

  Returns:
    On a TPU [B, M, K / m, W], with m heads side by side in the vector lanes: a
    set of them is read as one key/value head. Else x.
  """
  if backend != "mosaic_tpu":
    return x
  return fill_lanes(x, heads_in_lanes(*x.shape[2:]))


def forward_queries(backend: str, problem: Problem, q: jax.Array) -> jax.Array:
  """Queries [B, N, H, D] as a back end's forward kernel takes them."""
  return q if backend in _PICKS_ROWS else to_rows(backend, problem, q)


def to_rows(backend: str, problem: Problem, x: jax.Array) -> jax.Array:
  """Reorders pairs [B, N, H, D] to a back end's rows, [T * R, D or W]."""
  if backend == "mosaic_tpu":
    return tpu.to_rows(problem, x)
  return gather_rows(x, problem.blocks)


def _to_pairs(
  backend: str, problem: Problem, rows: jax.Array, dim: int
) -> jax.Array:
  """Reorders a back end's rows to pairs [B, N, H, D]."""
  if backend == "mosaic_tpu":
    return tpu.to_pairs(problem, rows, dim)
  return scatter_rows(rows, problem.blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, visible, blocks, options):
  return _forward(q, k, v, visible, blocks, options)[0]


# Indices in kernels are int32, also with `jax_enable_x64`.
@jax.enable_x64(False)
def _forward(q, k, v, visible, blocks, options):
  scale, backend, sizes, interpret = options
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  dim = q.shape[-1]
  q = forward_queries(backend, problem, q)
  kernels = BACKENDS[backend]
  out, log_sums = keep_attention(
    kernels.forward(problem, q, (k, v), sizes.forward)
  )
  saved = q, k, v, visible, blocks, out, log_sums
  return _to_pairs(backend, problem, out, dim), saved


@jax.enable_x64(False)
def _backward(options, saved, grad):
  scale, backend, sizes, interpret = options
  q, k, v, visible, blocks, out, log_sums = saved
  problem = Problem(k.shape, k.dtype, visible, blocks, scale, interpret)
  dim = grad.shape[-1]
  rows = to_rows(backend, problem, q) if backend in _PICKS_ROWS else q
  grad = to_rows(backend, problem, grad)
  kernels = BACKENDS[backend]
  dq, inner = kernels.query_gradient(
    problem, (rows, out, log_sums, grad), (k, v), sizes.dq
  )
  dk, dv = kernels.key_gradients(
    problem, (rows, log_sums, inner, grad), (k, v), sizes.dkv
  )
  dq = _to_pairs(backend, problem, dq, dim)
  return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)
