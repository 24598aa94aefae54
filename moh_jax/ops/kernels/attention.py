"""Attention of the active heads in one kernel, with its gradients.

The kernels read keys and values in place, and everything else as rows: the
active (token, head) pairs of `HeadBlocks`. A forward kernel may also pick its
rows out of the queries itself. Its results are kept as rows, so their size
follows the number of active heads.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads, D head
dim, T blocks, R rows of a block.
"""

import functools
import json
import os
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp

from moh_jax.ops.attention_forms import AttentionCase, Call, Form
from moh_jax.ops.basics import HALF, keep_attention
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.head_blocks import ActiveHeads, HeadBlocks, blocks_of
from moh_jax.ops.kernels import tpu_decode, triton_decode
from moh_jax.ops.kernels.hopper import Hopper
from moh_jax.ops.kernels.problem import (
  MAX_HEAD_DIM,
  BlockSizes,
  DecodeProblem,
  Kernels,
  Key,
  Problem,
  Tile,
  fitting,
  head_list,
)
from moh_jax.ops.kernels.tpu import Tpu
from moh_jax.ops.kernels.triton import Triton
from moh_jax.ops.target import Target, target

_DTYPES = (*HALF, "float32")


def unable(case: AttentionCase) -> str:
  """See `Backend.unable`."""
  if case.biased:
    return "logits without a bias; 'packed' adds it"
  if case.head_dim > MAX_HEAD_DIM:
    return f"a head_dim of at most {MAX_HEAD_DIM}, not {case.head_dim}"
  if case.dtype not in _DTYPES:
    return f"one of the dtypes {', '.join(_DTYPES)}, not {case.dtype}"
  if case.on_cpu and case.checked:
    return f"{case.check_problem} in Pallas's interpreter, as on this CPU"
  return pallas_backend(case.target, case.dtype, case.head_dim)[1]


def suits(case: AttentionCase, *, packs: bool) -> bool:
  """See `Backend.suits`; a CPU interprets kernels."""
  return not (case.on_cpu or unable(case))


def form(case: AttentionCase, *, packs: bool) -> Form:
  """See `Backend.form`."""
  backend, _ = pallas_backend(case.target, case.dtype, case.head_dim)
  per_head = case.queries * case.group
  per_head = int(per_head * case.share) if packs else per_head
  sizes = block_sizes(backend, case.head_dim, case.dtype, per_head)
  return Form("kernel", packs, sizes.rows, backend=backend)


def attend(call: Call, form: Form) -> jax.Array:
  """See `Backend.attend`."""
  group = call.q.shape[2] // call.k.shape[2]
  blocks = blocks_of(call.active, call.q.shape[:3], form.rows, group)
  interpret = target().platform == "cpu"
  return kernel_attention(
    call, blocks, backend=form.backend, interpret=interpret
  )


def kernel_attention(
  call: Call,
  blocks: HeadBlocks,
  *,
  backend: str,
  sizes: BlockSizes | None = None,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of the (token, head) pairs in a table, as one kernel.

  Products are in the widest dtype of queries, keys and values (float32 for
  float16 on a TPU), sums in float32. Products of float32 inputs have the
  precision of `jax.default_matmul_precision`, as anywhere in JAX.

  Args:
    call: arrays, bfloat16, float16 or float32, without a bias.
    blocks: the active pairs, in blocks of the key/value heads. The rows of a
      block, R, are a power of two of at least 16 for "triton", 64 or 128 for
      "mosaic_gpu" and a multiple of 8 for "mosaic_tpu".
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
  q, k, v = call.q, call.k, call.v
  chex.assert_rank((q, k, v), 4)
  chex.assert_equal_shape((k, v))
  chex.assert_shape(k, (q.shape[0], None, None, q.shape[3]))
  chex.assert_shape(blocks.row, q.shape[:3])
  chex.assert_shape(blocks.rank, (*q.shape[:2], k.shape[2]))
  dtype = product_dtype(backend, q.shape[-1], q=q, k=k, v=v)
  if sizes is None:
    sizes = block_sizes(backend, q.shape[-1], dtype)
  sizes = sizes.with_rows(blocks.token.shape[1])
  kernels = BACKENDS[backend]
  kernels.check(sizes)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  k, v = kernels.arranged(k), kernels.arranged(v)
  masks, scale = call.visible, float(call.scale)
  problem = Problem(k.shape, dtype, masks, blocks, scale, interpret)
  out = _attend(q, k, v, problem, (kernels, sizes))
  return out.astype(call.v.dtype)


def product_dtype(backend: str, head_dim: int, **arrays: Any) -> jnp.dtype:
  """The widest dtype of arrays that a back end multiplies.

  Args:
    backend: of Pallas, one of `BACKENDS`.
    head_dim: D.
    **arrays: by the names that an error gives them.

  Raises:
    ValueError: no kernels exist for the back end, or they do not read a dtype.
  """
  if backend not in BACKENDS:
    raise ValueError(f"backend={backend!r} must be one of {set(BACKENDS)}")
  for name, x in arrays.items():
    if x.dtype.name not in _DTYPES:
      known = ", ".join(_DTYPES)
      raise ValueError(f"{name} is {x.dtype.name}, must be one of {known}")
  dtype = jnp.result_type(*arrays.values())
  if reason := BACKENDS[backend].lacks(dtype.name, head_dim):
    raise ValueError(f"backend={backend!r} needs {reason}")
  if backend == "mosaic_tpu" and dtype == jnp.float16:
    return jnp.dtype(jnp.float32)  # TPUs have no float16
  return dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, problem, options):
  return _forward(q, k, v, problem, options)[0]


@jax.custom_jvp
def _once(arrays):
  return arrays


@_once.defjvp
def _refuse(arrays, tangents):
  raise ValueError(
    "kernels of attention have no second derivatives; implementation='packed' "
    "and 'dense' have them"
  )


# Indices in kernels are int32, also with `jax_enable_x64`.
@jax.enable_x64(False)
def _forward(q, k, v, problem, options):
  q, k, v = _once((q, k, v))
  (kernels, sizes), dim = options, q.shape[-1]
  if not kernels.picks_rows:
    q = kernels.to_rows(problem, q)
  out, log_sums = keep_attention(
    kernels.run("forward", problem, (q,), (k, v), sizes.forward)
  )
  saved = q, k, v, problem, out, log_sums
  return kernels.to_pairs(problem, out, dim), saved


@jax.enable_x64(False)
def _backward(options, saved, grad):
  (kernels, sizes), dim, grad = options, grad.shape[-1], _once(grad)
  q, k, v, problem, out, log_sums = saved
  rows = kernels.to_rows(problem, q) if kernels.picks_rows else q
  grad = kernels.to_rows(problem, grad)
  given = rows, out, log_sums, grad
  dq, inner = kernels.run("dq", problem, given, (k, v), sizes.dq)
  given = rows, log_sums, inner, grad
  dk, dv = kernels.run("dkv", problem, given, (k, v), sizes.dkv)
  return kernels.to_pairs(problem, dq, dim), dk, dv, None


_attend.defvjp(_forward, _backward)


FILE_VARIABLE = "MOH_JAX_BLOCK_SIZES"
# By the name that Pallas has for them; the first that is able runs a call.
BACKENDS: dict[str, Kernels] = {
  "mosaic_gpu": Hopper(),
  "triton": Triton(),
  "mosaic_tpu": Tpu(),
}


def pallas_backend(
  device: Target, dtype: str = "", head_dim: int = 0
) -> tuple[str, str]:
  """The first back end that is able to run on a device.

  Args:
    device: the device; a CPU interprets kernels.
    dtype: name of the dtype of queries, keys and values; without it the back
      end is one that serves all.
    head_dim: D.

  Returns:
    Its name, and what would be needed if there is none.
  """
  call = device, dtype, head_dim
  for name, kernels in BACKENDS.items():
    if not kernels.unable(*call):
      return name, ""
  return "", BACKENDS["triton"].unable(*call)


def kernel_options(
  device: Target, dtype: str = "", head_dim: int = 0
) -> dict[str, Any]:
  """The keyword arguments with which the functions of kernels run on a device.

  Args:
    device: the device.
    dtype: as in `pallas_backend`.
    head_dim: D.

  Returns:
    "backend", the back end of Pallas, and "interpret", True on a CPU.

  Raises:
    ValueError: no kernels exist for the device.
  """
  backend, reason = pallas_backend(device, dtype, head_dim)
  if reason:
    raise ValueError(f"implementation='kernel' needs {reason}")
  return {"backend": backend, "interpret": device.platform == "cpu"}


def has_kernels(device: Target, dtype: str = "", head_dim: int = 0) -> bool:
  """Whether kernels are compiled for a device; a CPU interprets them, slowly.

  Args:
    device: the device.
    dtype: as in `pallas_backend`.
    head_dim: D.
  """
  compiled = device.platform != "cpu"
  return compiled and not pallas_backend(device, dtype, head_dim)[1]


def block_sizes(
  backend: str,
  head_dim: int,
  dtype: jax.typing.DTypeLike,
  per_head: int | None = None,
) -> BlockSizes:
  """Looks up the tiles for the device that a program is traced for.

  Args:
    backend: of Pallas, one of `BACKENDS`.
    head_dim: D, at most 256.
    dtype: dtype of the queries.
    per_head: rows that a key/value head has on average, N * active heads / K:
      blocks get smaller where these are few. None keeps the blocks as they are.

  Returns:
    Measured sizes if the file of the environment has them, else the defaults.

  Raises:
    ValueError: the head dim is too large.
  """
  dtype, kernels = jnp.dtype(dtype), BACKENDS[backend]
  sizes = measured().get(Key(backend, target().kind, head_dim, dtype.name))
  if sizes is None:
    sizes = fitting(kernels.tiles, head_dim, dtype)
  # The last block of each is half empty on average, which costs more the fewer
  # blocks there are.
  if per_head is not None and per_head < kernels.few_rows:
    least = min(kernels.least_rows, sizes.rows)
    sizes = sizes.with_rows(max(least, sizes.rows // 2))
  return sizes


def read(path: str | os.PathLike) -> dict[Key, BlockSizes]:
  """Reads a file of measured sizes, as `benchmarks.tiles` writes it.

  Args:
    path: a JSON list with one entry per `Key`.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is not such a file, or its tiles would give wrong results.
  """
  try:
    return dict(map(_parse, json.loads(pathlib.Path(path).read_text())))
  except (KeyError, RecursionError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path} is not a file of block sizes, for {FILE_VARIABLE}: {error}"
    ) from None


def _parse(entry: dict) -> tuple[Key, BlockSizes]:
  """Reads and checks one entry of a file."""
  entry, tiles = dict(entry), {}
  key = Key(*(entry.pop(name) for name in Key._fields))
  if key.backend not in BACKENDS:
    raise ValueError(f"backend={key.backend!r} must be one of {list(BACKENDS)}")
  if not 1 <= key.head_dim <= MAX_HEAD_DIM:
    raise ValueError(
      f"head_dim={key.head_dim!r} must be in [1, {MAX_HEAD_DIM}]"
    )
  for name, tile in entry.items():
    try:
      tiles[name] = Tile(**tile)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{name}: {error}") from None
  BACKENDS[key.backend].check(sizes := BlockSizes(**tiles))
  return key._replace(dtype=jnp.dtype(key.dtype).name), sizes


@functools.cache
def measured() -> dict[Key, BlockSizes]:
  """Reads the file that MOH_JAX_BLOCK_SIZES names, once; empty without it."""
  path = os.environ.get(FILE_VARIABLE)
  return read(path) if path else {}


# By back end of Pallas.
_KERNELS = {"triton": triton_decode, "mosaic_tpu": tpu_decode}


def attend_to_cache(
  q: jax.Array, cache: LayerCache, slots: Slots, active: ActiveHeads | None
) -> jax.Array:
  """Attention of one new token per text, on the device that it is traced for.

  Args:
    q: [B, 1, H, D].
    cache: keys and values [B, K, M, D].
    slots: which slots each token sees.
    active: the active heads; None is every head.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot, NaN for texts whose token has too many heads.

  Raises:
    ValueError: a dtype or the head dim is not supported.
  """
  active, factor = (None, 1.0) if active is None else active.bounded()
  options = kernel_options(target())
  return factor * kernel_decode(q, cache, slots, active, **options)


@jax.enable_x64(False)  # indices in kernels are int32
def kernel_decode(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  active: ActiveHeads | None,
  *,
  backend: str,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention of one new token per text, without gradients.

  Sums are float32. Queries and keys are multiplied in the wider of their
  dtypes; a narrower cache is widened as it is read. The scales of an int8 cache
  multiply logits and weights. TPUs have no float16: a float16 cache is copied
  to float32 first.

  Args:
    q: [B, 1, H, D] bfloat16, float16 or float32.
    cache: keys and values [B, K, M, D] in one of these dtypes, or int8 with
      scales; query head h reads key/value head h // (H / K).
    slots: which slots each token sees.
    active: the active heads; None is every head. A key/value head is read if
      any of its query heads is active.
    backend: of Pallas, "triton" (NVIDIA GPUs) or "mosaic_tpu".
    interpret: runs the kernels in Pallas's interpreter, on any device, slowly.

  Returns:
    [B, 1, H, D] in the dtype of q; 0 for inactive heads and for tokens that
    see no slot.

  Raises:
    ValueError: the back end, a dtype or the head dim is not supported.
  """
  chex.assert_rank((q, cache.k), 4)
  batch, _, heads, dim = q.shape
  kv_heads, most_slots = cache.k.shape[1:3]
  chex.assert_shape(q, (batch, 1, heads, dim))
  chex.assert_shape((cache.k, cache.v), (batch, kv_heads, most_slots, dim))
  first = slots.first.astype(jnp.int32)
  end = jnp.broadcast_to(slots.start + 1, first.shape).astype(jnp.int32)
  if cache.k_scale is None:
    dtype = product_dtype(backend, dim, q=q, k=cache.k, v=cache.v)
    if backend == "mosaic_tpu" and cache.k.dtype == jnp.float16:
      cache = jax.tree.map(lambda x: x.astype(jnp.float32), cache)
  else:
    dtype = product_dtype(backend, dim, q=q)  # holds all values of int8
  shape = batch, kv_heads, heads // kv_heads, dim
  chosen = jnp.broadcast_to((first < end)[:, None, None], shape[:3])
  most = kv_heads
  if active is not None:
    chex.assert_shape(active.mask, (batch, 1, heads))
    chosen = chosen & active.mask.reshape(shape[:3])
    most = min(kv_heads, active.max_per_token)
  problem = DecodeProblem(
    cache,
    head_list(chosen.any(-1), most),
    jnp.maximum(first, 0),
    jnp.minimum(end, most_slots),
    dtype,
    interpret,
  )
  out = _KERNELS[backend].attend(problem, q.astype(dtype).reshape(shape))
  out = jnp.where(chosen[..., None], out, 0.0)
  return out.astype(q.dtype).reshape(q.shape)
