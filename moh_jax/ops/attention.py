"""Attention of each head, one function for all forms, and which form computes.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads (H is a
multiple of K), D head dim. `jax.nn.dot_product_attention` has the same layout
but calls the heads N and the head dim H.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, reshard

from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.ops.basics import HALF, as_mask, check_array
from moh_jax.ops.cache import LayerCache, Slots, split_texts
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.dense import cached_dense_attention, dense_attention
from moh_jax.ops.kernels import decode
from moh_jax.ops.kernels.attention import (
  DTYPES,
  MAX_HEAD_DIM,
  Kernels,
  block_sizes,
  kernel_attention,
)
from moh_jax.ops.kernels.hopper import Hopper
from moh_jax.ops.kernels.tpu import Tpu
from moh_jax.ops.lanes import LANES
from moh_jax.ops.packed import packed_attention
from moh_jax.ops.pairs import ActiveHeads, blocks_of
from moh_jax.ops.stock import cudnn_attention, splash_attention
from moh_jax.ops.target import (
  Target,
  has_cudnn,
  on_one_device,
  target,
  vary_alike,
  varying_axes,
)

HOPPER, TPU = Hopper(), Tpu()
# Largest size of the logits [B, H, N, M] float32 that a device holds at once.
# On a CPU it is what the caches hold: several times slower beyond.
_MAX_LOGITS_BYTES = {"cpu": 12 << 20, "gpu": 1 << 30, "tpu": 1 << 30}
# On a CPU, sequences shorter than this take blocks of 32 rows.
_SHORT = 384
# From so many tokens on, a CPU gains from leaving out hidden keys of causal
# attention, also where all logits would fit.
_LONG_CAUSAL = 256
# Largest head dim that cuDNN's fused attention has gradients for everywhere.
_MOST_OF_CUDNN = 128
# By the number of tokens, the largest share of active heads at which packing
# was measured to pay on an H100, for head dims up to 64 without a causal mask.
_H100_64 = {
  256: 0.0, 512: 0.36, 1024: 0.63, 2048: 0.72, 4096: 0.82, 8192: 0.84,
  16384: 0.87,
}  # fmt: skip


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  bias: jax.Array | None = None,
  key_mask: jax.Array | None = None,
  segments: jax.Array | None = None,
  causal: bool = False,
  scale: float | None = None,
  active: jax.Array | None = None,
  max_active: int | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of the active heads, before heads are mixed.

  Args:
    q: [B, N, H, D] queries.
    k: [B, M, K, D] keys; query head h reads key/value head h // (H / K).
    v: [B, M, K, D] values.
    bias: added to the scaled logits, broadcastable to [B, H, N, M]. A key whose
      bias is -inf is not seen.
    key_mask: [B, M] bool, False for keys that no query may see (padding).
    segments: [B, N] int32 where N = M: a query sees only keys of its own
      segment (a document of several packed into one sequence).
    causal: query n sees the keys up to n + M - N, so fewer queries than keys
      are the last ones of the sequence.
    scale: factor of the logits, above 0; None is D ** -0.5.
    active: [B, N, H] bool, the heads that each token uses; None is every head.
      The output of an inactive head is unspecified, either 0 or its attention:
      multiply it by a gate of 0.
    max_active: active heads that any one token has at most; None is H. Forms
      that skip heads return NaN for a sequence in which a token has more.
    implementation: "dense" computes every head and "packed" the active ones,
      both in plain XLA; "kernel" computes the active ones in one Pallas kernel;
      "cudnn" uses cuDNN; "auto" takes the fastest by measurement for the shapes
      and the device (see `choose_form`).

  Returns:
    [B, N, H, D] in the dtype of v. A query that sees no key gets 0.

  Raises:
    ValueError: the implementation is unknown or does not support the call, H
      is not a multiple of K, or an argument has another shape or dtype.
  """
  visible = Visible(as_mask(key_mask), segments, causal)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  heads = None
  if active is not None:
    most = active.shape[-1] if max_active is None else max_active
    heads = ActiveHeads(as_mask(active), most)
  call = Call(q, k, v, visible, scale, bias, heads)
  _check(call)
  return attend(call, implementation)


def _check(call: Call) -> None:
  """Refuses what the forms would take for something else."""
  for name in "qkv":
    if (array := getattr(call, name)).ndim != 4:
      raise ValueError(f"{name} has shape {array.shape}, must have 4 axes")
  batch, queries, heads, dim = call.q.shape
  keys, kv_heads = call.k.shape[1:3]
  if heads % kv_heads:
    raise ValueError(
      f"{heads} query heads are not a multiple of the {kv_heads} key/value "
      "heads"
    )
  visible, bias, active = call.visible, call.bias, call.active
  if visible.segments is not None and queries != keys:
    raise ValueError(f"segments: the {queries} queries must be the {keys} keys")
  stored = batch, keys, kv_heads, dim
  logits = batch, heads, queries, keys
  for name, array, kind, shape in (
    ("q", call.q, jnp.floating, call.q.shape),
    ("k", call.k, jnp.floating, stored),
    ("v", call.v, jnp.floating, stored),
    ("key_mask", visible.key_mask, bool, (batch, keys)),
    ("segments", visible.segments, jnp.integer, (batch, keys)),
    ("active", active and active.mask, bool, (batch, queries, heads)),
  ):
    check_array(name, array, kind, shape)
  if call.scale <= 0:
    raise ValueError(f"scale={call.scale} must be above 0")
  if active is not None and active.max_per_token < 1:
    raise ValueError(f"max_active={active.max_per_token} must be above 0")
  if bias is not None:
    sizes = zip(bias.shape[::-1], logits[::-1])
    fits = bias.ndim <= 4 and all(size in (1, full) for size, full in sizes)
    check_array("bias", bias, jnp.floating, bias.shape if fits else logits)


def attend(call: Call, implementation: str) -> jax.Array:
  """`attention` of a `Call`, whose active heads have no parts."""
  call = vary_alike(call)
  if call.bias is not None:
    bias = jax.lax.broadcast_to_rank(call.bias, 4)
    call = dataclasses.replace(call, bias=bias)
  if jax.typeof(call.q).sharding.mesh.explicit_axes:
    return _attend_explicitly(call, implementation)
  device = target()
  form = choose_form(implementation, call, device)
  active, factor = call.active.bounded() if form.packs else (None, 1.0)
  visible = call.visible
  if visible.segments is not None:
    segments = visible.segments.astype(jnp.int32)
    visible = dataclasses.replace(visible, segments=segments)
  call = dataclasses.replace(call, visible=visible, active=active)
  if form.name in _WITHOUT_BLOCKS:
    return _WITHOUT_BLOCKS[form.name](call)
  blocks = blocks_of(call.active, call.q.shape[:3], form.rows, call.group)
  if form.name == "kernel":
    on_cpu = device.platform == "cpu"
    out = kernel_attention(call, blocks, kernels_of(device), interpret=on_cpu)
  else:
    out = packed_attention(call, blocks, form.blocks_per_step)
  return factor * out if form.packs else out


_WITHOUT_BLOCKS = {
  "dense": dense_attention,
  "cudnn": cudnn_attention,
  "splash": splash_attention,
}


def _attend_explicitly(call: Call, implementation: str) -> jax.Array:
  """Runs `attend` on each device's own part of the batch.

  Along Explicit axes of a mesh the types of arrays say how they are split, and
  few operations take every split. Tokens and heads are gathered.
  """
  own, batch = jax.typeof(call.q).sharding, len(call.q)
  each, whole = PartitionSpec(own.spec[0]), PartitionSpec()
  specs = jax.tree.map(lambda x: each if len(x) == batch else whole, call)
  run = jax.shard_map(
    lambda call: attend(call, implementation),
    mesh=own.mesh,
    in_specs=(specs,),
    out_specs=each,
    axis_names=set(own.mesh.explicit_axes),
    check_vma=False,  # not all forms' kernels are typed
  )
  shardings = jax.tree.map(lambda x: NamedSharding(own.mesh, x), specs)
  return reshard(run(jax.tree.map(reshard, call, shardings)), own)


@dataclasses.dataclass(frozen=True)
class Form:
  """A form of attention, with the sizes of its blocks.

  Attributes:
    name: "dense", every head, all logits at once; "blocked", every head, some
      rows at a time; "packed", the active heads, some rows at a time; "kernel",
      every head or the active ones, in one Pallas kernel; "cudnn" or "splash",
      every head, in kernels of others for GPUs and TPUs.
    packs: whether only the active heads are computed.
    rows: rows of a block; 0 for forms without blocks.
    blocks_per_step: blocks of a key/value head that one step of the loop
      computes, at most.
  """

  name: str
  packs: bool = False
  rows: int = 0
  blocks_per_step: int = 1


def choose_form(implementation: str, call: Call, device: Target) -> Form:
  """Chooses the form of a call.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    call: arrays, or their shapes, of the part that one device computes. Where
      the compiler splits them over a mesh, it gets plain XLA alone.
    device: the device that it runs on.

  Returns:
    The form, with the sizes of its blocks.

  Raises:
    ValueError: the implementation is unknown or does not support the call.
  """
  _check_known(implementation)
  packs = call.share < 1
  if implementation == "kernel":
    _refuse(implementation, kernel_needs(call, device))
    return _kernel_form(call, device, packs=packs)
  if implementation == "cudnn":
    _refuse(implementation, _cudnn_needs(call, device))
    return Form("cudnn")
  if implementation == "packed" and packs:
    return _block_form(call, packs=True)
  if implementation != "auto" or not on_one_device():
    return Form("dense") if _is_small(call, device) else _large_blocks(call)
  every = _form_of_every_head(call, device)
  if not packs or (every.name == "dense" and not call.visible.causal):
    return every  # all logits of a sequence at once are fastest
  if device.platform == "cpu":
    fewer = _block_form(call, packs=True)
  elif kernel_needs(call, device):
    return every
  else:
    fewer = _kernel_form(call, device, packs=True)
  return fewer if call.share <= _largest_share(call, device) else every


def _form_of_every_head(call: Call, device: Target) -> Form:
  """The fastest form of every head."""
  if not call.masked and not _cudnn_needs(call, device):
    return Form("cudnn")
  if not _splash_needs(call, device):
    return Form("splash")
  on_cpu, causal = device.platform == "cpu", call.visible.causal
  if not (on_cpu or kernel_needs(call, device)):
    return _kernel_form(call, device, packs=False)
  fast = True
  if on_cpu and causal:
    fast = call.queries < _LONG_CAUSAL
  elif on_cpu:
    # Blocks are computed in float32, which all logits need not be.
    fast = call.queries < _SHORT or call.dtype != "float32"
  if _is_small(call, device) and fast:
    return Form("dense")
  if on_cpu and causal:
    return _block_form(call, packs=False)
  return _large_blocks(call)


def _is_small(call: Call, device: Target) -> bool:
  """Whether all logits, float32, may be in memory at once."""
  size = 4 * call.batch * call.heads * call.queries * call.keys
  return size <= _MAX_LOGITS_BYTES.get(device.platform, 0)


def _block_form(call: Call, *, packs: bool) -> Form:
  """Some rows at a time, so many that their logits stay in a CPU's caches."""
  rows, count = (128 if call.queries >= 2048 else 64), 4
  if not call.visible.causal:
    # A step's logits of all keys take at most 4 MiB of the caches.
    rows, count = 64, 8 if call.keys <= 2048 else 4
  rows = 32 if call.queries < _SHORT else rows
  return Form("packed" if packs else "blocked", packs, rows, count)


def _large_blocks(call: Call) -> Form:
  """Every head, in blocks of many rows, each computed on its own."""
  # A causal block computes logits of all keys up to its last row: the larger
  # the block, the more of them are masked.
  long = call.queries >= 2048 and not call.visible.causal
  return Form("blocked", rows=min(call.queries, 1024 if long else 512))


def _kernel_form(call: Call, device: Target, *, packs: bool) -> Form:
  """The kernel, with fewer rows of a block where a key/value head has few."""
  per_head = call.queries * call.group
  per_head = int(per_head * call.share) if packs else per_head
  kernels = kernels_of(device)
  sizes = block_sizes(kernels, call.head_dim, call.dtype, per_head)
  return Form("kernel", packs, sizes.forward.rows)


def _largest_share(call: Call, device: Target) -> float:
  """The largest share of active heads at which packing pays."""
  half, tokens = call.dtype in HALF, call.queries
  causal = call.visible.causal
  if device.platform == "cpu":
    few = half and tokens < 512  # too few to make up for float32 blocks
    if tokens < 256 or (few and not causal):
      return 0.0
    return 0.5 if few else 0.8
  is_measured = device.kind == "NVIDIA H100 80GB HBM3"
  if is_measured and half and not causal and call.head_dim <= 64:
    lengths, shares = zip(*_H100_64.items())
    return float(np.interp(math.log(tokens), np.log(lengths), shares, left=0))
  return 0.0 if tokens < 1024 else 0.5 if tokens < 4096 else 0.75


def kernels_of(device: Target) -> Kernels:
  """The kernels of a device; a CPU interprets those for TPUs."""
  return HOPPER if device.platform == "gpu" else TPU


def kernel_needs(call: Call, device: Target) -> str:
  """What the kernel needs and a call lacks; empty if nothing."""
  if call.bias is not None:
    return "logits without a bias; 'packed' adds it"
  if call.head_dim > MAX_HEAD_DIM:
    return f"a head_dim of at most {MAX_HEAD_DIM}, not {call.head_dim}"
  if call.dtype not in DTYPES:
    return f"one of the dtypes {', '.join(DTYPES)}, not {call.dtype}"
  if device.platform == "cpu" and varying_axes(call):
    return f"{_UNCHECKED} in Pallas's interpreter, as on this CPU"
  return kernels_of(device).unable(device, call.dtype, call.head_dim)


def _cudnn_needs(call: Call, device: Target) -> str:
  """What cuDNN needs and a call lacks; empty if nothing."""
  if problem := device.gpu_problem:
    return problem
  if not has_cudnn():
    return "JAX's plug-in for CUDA, which is not installed"
  if call.dtype not in HALF:
    return f"model.dtype bfloat16 or float16, not {call.dtype}"
  if call.head_dim % 8 or call.head_dim > _MOST_OF_CUDNN:
    most = f"a multiple of 8 and at most {_MOST_OF_CUDNN}"
    return f"a head_dim that is {most}, not {call.head_dim}"
  if varying_axes(call):
    return _UNCHECKED
  if call.bias is not None and (call.queries % 2 or call.keys % 2):
    # Its gradients exist for even numbers alone.
    sizes = f"{call.queries} and {call.keys}"
    return f"even numbers of queries and keys beside a bias, not {sizes}"
  return ""


def _splash_needs(call: Call, device: Target) -> bool:
  """Whether splash attention lacks something that a call needs."""
  sizes = call.queries, call.keys
  return (
    device.platform != "tpu"
    or varying_axes(call)
    or call.bias is not None
    or call.dtype not in ("bfloat16", "float32")
    or call.head_dim > MAX_HEAD_DIM
    or any(x % LANES for x in sizes)
    or (call.visible.causal and call.queries > call.keys)
    or jax.config.jax_enable_x64  # its gradients mix int32 and int64
  )


# What kernels need whose results have no type that can be checked.
_UNCHECKED = "check_vma=False of jax.shard_map"


def _refuse(implementation: str, needs: str) -> None:
  if needs:
    raise ValueError(f"implementation={implementation!r} needs {needs}")


def _check_known(implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}"
    )


def cached_attention(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  active: ActiveHeads | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Softmax attention of new tokens to the slots of a key/value cache.

  Logits are scaled by D ** -0.5.

  Args:
    q: [B, n, H, D] queries of the new tokens, after RoPE.
    cache: keys and values [B, K, M, D] or [B * K, M, D], those of the new
      tokens among them.
    slots: which slots each new token sees; `first` is not None.
    active: the heads that tokens use; None is every head. The outputs of other
      heads are finite and otherwise undefined; a gate of 0 makes them 0. A text
      whose token has more than `active.max_per_token` gets NaN from the kernel.
    implementation: see `choose_cached_form`.

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.

  Raises:
    ValueError: the implementation is unknown, or the device has no kernel.
  """
  device, (batch, new, _, dim) = target(), q.shape
  form = choose_cached_form(implementation, device, new=new, head_dim=dim)
  if form == "dense":
    return cached_dense_attention(q, cache, slots)
  _refuse("kernel", decode.unable(device, dim))
  cache, on_cpu = split_texts(cache, batch), device.platform == "cpu"
  return decode.decode_attention(q, cache, slots, active, interpret=on_cpu)


def choose_cached_form(
  implementation: str, device: Target, *, new: int, head_dim: int
) -> str:
  """Chooses the form in which new tokens attend to a cache.

  "auto" is "kernel" on GPUs, also where every head is active: a cache has slots
  for tokens to come, which the dense form would read.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    device: the device that it runs on.
    new: new tokens per text; the kernel takes one.
    head_dim: D.

  Returns:
    "kernel", which reads the active heads and the visible slots; or "dense",
    which reads all.

  Raises:
    ValueError: the implementation is unknown.
  """
  _check_known(implementation)
  pays = device.platform == "gpu" and not decode.unable(device, head_dim)
  wanted = implementation == "kernel" or (implementation == "auto" and pays)
  return "kernel" if wanted and new == 1 else "dense"
