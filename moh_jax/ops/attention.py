"""Attention of each head, one function for all implementations.

Shapes: B batch, N queries, M keys, H query heads, K key/value heads (H is a
multiple of K), D head dim. `jax.nn.dot_product_attention` has the same layout
but calls the heads N and the head dim H.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.ops import blocked, cudnn, dense, splash
from moh_jax.ops.attention_forms import (
  AttentionCase,
  Backend,
  Call,
  Form,
  Visible,
)
from moh_jax.ops.basics import check_array
from moh_jax.ops.cache import LayerCache, Slots, split_texts
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels import attention as kernel
from moh_jax.ops.kernels.attention import has_kernels
from moh_jax.ops.kernels.problem import MAX_HEAD_DIM
from moh_jax.ops.picked_heads import attend_picked
from moh_jax.ops.target import (
  Target,
  has_cudnn,
  on_one_device,
  target,
  vary_alike,
  varying_axes,
)

# All forms, equal up to rounding. "auto" takes the first one that suits a call.
BACKENDS: dict[str, Backend] = {
  "cudnn": cudnn,  # every head, on NVIDIA GPUs
  "splash": splash,  # every head, in JAX's kernel for TPUs
  "kernel": kernel,  # every head or the active ones, in one Pallas kernel
  "dense": dense,  # every head, all logits at once
  "blocked": blocked,  # every head, some rows at a time
  "packed": blocked,  # the active heads, some rows at a time
}


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
  active: ActiveHeads | None = None,
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
    scale: factor of the logits; None is D ** -0.5.
    active: the heads that each token uses; None is every head. The output of an
      inactive head is unspecified, either 0 or its attention: multiply it by a
      gate of 0. Forms that skip heads return NaN for a sequence in which a
      token has more than `active.max_per_token`.
    implementation: "dense" computes every head and "packed" the active ones,
      both in plain XLA; "kernel" computes the active ones in one Pallas kernel;
      "cudnn" uses cuDNN; "auto" takes the fastest by measurement for the shapes
      and the device (see `BACKENDS`).

  Returns:
    [B, N, H, D] in the dtype of v. A query that sees no key gets 0.

  Raises:
    ValueError: the implementation is unknown or does not support the call, H
      is not a multiple of K, or an argument has another shape or dtype.
  """
  _check_arguments(q, k, v, bias, key_mask, segments, active)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  visible = Visible(key_mask, segments, causal)
  call = Call(q, k, v, visible, scale, bias, active)
  if active is None or active.parts == 1:
    return attend(call, implementation)

  def attend_to(q: jax.Array) -> jax.Array:
    return attend(dataclasses.replace(call, q=q, active=None), implementation)

  return attend_picked(attend_to, q, active, bias)


def _check_arguments(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  key_mask: jax.Array | None,
  segments: jax.Array | None,
  active: ActiveHeads | None,
) -> None:
  """Refuses what the forms would take for something else."""
  for name, array in (("q", q), ("k", k), ("v", v)):
    if array.ndim != 4:
      raise ValueError(f"{name} has shape {array.shape}, must have 4 axes")
  batch, queries, heads, dim = q.shape
  keys, kv_heads = k.shape[1:3]
  check_array("q", q, jnp.floating, (batch, queries, heads, dim))
  for name, array in (("k", k), ("v", v)):
    check_array(name, array, jnp.floating, (batch, keys, kv_heads, dim))
  check_array("key_mask", key_mask, bool, (batch, keys))
  check_array("segments", segments, jnp.integer, (batch, keys))
  if segments is not None and queries != keys:
    raise ValueError(f"segments: the {queries} queries must be the {keys} keys")
  if bias is not None:
    sizes = zip(bias.shape[::-1], (keys, queries, heads, batch))
    fits = bias.ndim <= 4 and all(size in (1, full) for size, full in sizes)
    shape = bias.shape if fits else (batch, heads, queries, keys)
    check_array("bias", bias, jnp.floating, shape)
  if active is not None:
    check_array("active.mask", active.mask, bool, (batch, queries, heads))
    most, parts = active.max_per_token, active.parts
    if most < 1:
      raise ValueError(f"max_per_token={most} must be at least 1")
    if parts != 1 and (parts != kv_heads or most % parts):
      allowed = f"1, or the {kv_heads} key/value heads and divide max_per_token"
      raise ValueError(f"active.parts={parts} must be {allowed}={most}")


def attend(call: Call, implementation: str) -> jax.Array:
  """`attention` of a `Call`."""
  q, k = call.q, call.k
  batch, queries, heads, dim = q.shape
  keys = k.shape[1]
  if heads % k.shape[2]:
    raise ValueError(
      f"{heads} query heads are not a multiple of the {k.shape[2]} key/value "
      "heads"
    )
  call = vary_alike(call)
  active, visible, bias = call.active, call.visible, call.bias
  if not (q.size and k.size):
    return jnp.zeros(q.shape, call.v.dtype)
  mesh = jax.typeof(q).sharding.mesh
  axes = zip(mesh.axis_names, mesh.axis_types)
  if axes := {name for name, kind in axes if kind == AxisType.Explicit}:
    return _attend_on(axes, call, implementation)
  hides = visible.key_mask is not None or queries != keys
  case = AttentionCase(
    target=target(),
    batch=batch,
    queries=queries,
    keys=keys,
    num_heads=heads,
    head_dim=dim,
    share=1.0 if active is None else active.share,
    causal=visible.causal,
    masked=visible.segments is not None or (visible.causal and hides),
    biased=bias is not None,
    group=heads // k.shape[2],
    dtype=jnp.result_type(q, k, call.v).name,
    one_device=on_one_device(),
    has_cudnn=has_cudnn(),
    checked=bool(varying_axes(call)),
  )
  form = choose_form(implementation, case)
  active, factor = active.bounded() if form.packs else (None, 1.0)
  if visible.segments is not None:
    segments = visible.segments.astype(jnp.int32)
    visible = dataclasses.replace(visible, segments=segments)
  if bias is not None:
    bias = jax.lax.broadcast_to_rank(bias, 4)
  call = dataclasses.replace(call, visible=visible, bias=bias, active=active)
  out = BACKENDS[form.name].attend(call, form)
  return factor * out if form.packs else out


def _attend_on(axes: set[str], call: Call, implementation: str) -> jax.Array:
  """Runs `attend` on each device's own part of the batch and the heads.

  Along Explicit axes of a mesh the types of arrays say how they are split, and
  few operations take every split. Tokens are gathered.
  """
  own = jax.typeof(call.q).sharding
  batch, heads = own.spec[0], jax.typeof(call.k).sharding.spec[2]
  lead = (batch, None, heads)
  specs = jax.tree.map(lambda x: PartitionSpec(*lead[: x.ndim]), call)
  if call.bias is not None:
    bias = jax.lax.broadcast_to_rank(call.bias, 4)
    lead = (a if n > 1 else None for a, n in zip((batch, heads), bias.shape))
    call = dataclasses.replace(call, bias=bias)
    specs = dataclasses.replace(specs, bias=PartitionSpec(*lead))
  run = jax.shard_map(
    lambda call: attend(call, implementation),
    mesh=own.mesh,
    in_specs=(specs,),
    out_specs=specs.q,
    axis_names=axes,
    check_vma=False,  # not all forms' kernels are typed
  )
  shardings = jax.tree.map(lambda x: NamedSharding(own.mesh, x), specs)
  return reshard(run(jax.tree.map(reshard, call, shardings)), own)


def choose_form(implementation: str, case: AttentionCase) -> Form:
  """Chooses the form of a call.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    case: properties of the call.

  Returns:
    The form, with the sizes of its blocks.

  Raises:
    ValueError: the implementation is unknown or does not support the call.
  """
  _check_known(implementation)
  if implementation not in ("auto", "dense", "packed"):
    if reason := BACKENDS[implementation].unable(case):
      raise ValueError(f"implementation={implementation!r} needs {reason}")
    return BACKENDS[implementation].form(case, packs=case.share < 1)
  if implementation == "packed" and case.share < 1:
    return blocked.form(case, packs=True)
  if implementation != "auto" or not case.one_device:
    if dense.unable(case):
      return blocked.large_blocks(case)
    return dense.form(case, packs=False)
  every = _fastest(case, packs=False)
  if case.share == 1 or (every.name == "dense" and not case.causal):
    return every  # all logits of a sequence at once are fastest
  packed = _fastest(case, packs=True)
  same_kernel = packed.name == every.name
  largest = largest_share(case, packed.backend, same_kernel=same_kernel)
  return packed if case.share <= largest else every


def _fastest(case: AttentionCase, *, packs: bool) -> Form:
  """The form of the first back end that suits a call."""
  suiting = (x for x in BACKENDS.values() if x.suits(case, packs=packs))
  return next(suiting).form(case, packs=packs)  # the last one suits all calls


def cached_attention(
  q: jax.Array,
  cache: LayerCache,
  slots: Slots,
  form: str,
  active: ActiveHeads | None = None,
) -> jax.Array:
  """Softmax attention of new tokens to the slots of a key/value cache.

  Logits are scaled by D ** -0.5.

  Args:
    q: [B, n, H, D] queries of the new tokens, after RoPE.
    cache: keys and values [B, K, M, D] or [B * K, M, D], those of the new
      tokens among them.
    slots: which slots each new token sees; `first` is not None.
    form: from `choose_cached_form`.
    active: the heads that tokens use; None is every head. The outputs of other
      heads are finite and otherwise undefined; a gate of 0 makes them 0. A text
      whose token has more than `active.max_per_token` gets NaN from "kernel".

  Returns:
    [B, n, H, D] in the dtype of q; 0 where no slot is visible.

  Raises:
    ValueError: the device has no kernels.
  """
  if form == "dense":
    return dense.attend_to_cache(q, cache, slots)
  if form == "groups":
    return dense.attend_to_groups(q, cache, slots, active)
  return kernel.attend_to_cache(q, split_texts(cache, len(q)), slots, active)


def choose_cached_form(
  implementation: str,
  device: Target,
  *,
  new: int,
  head_dim: int,
  unit: int = 1,
) -> str:
  """Chooses the form in which new tokens attend to a cache.

  "auto" is "kernel" on GPUs and TPUs, also where every head is active: a cache
  has slots for tokens to come, which the dense form would read. On CPUs it is
  "groups" where tokens choose whole key/value groups, else "dense".

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    device: the device that it runs on.
    new: new tokens per text; the kernel takes one.
    head_dim: D; "auto" is "dense" for heads that are too wide for the kernel.
    unit: see `ActiveHeads`.

  Returns:
    "kernel", which reads the active heads and the visible slots; "groups",
    which reads the active key/value heads; or "dense", which reads all.

  Raises:
    ValueError: the implementation is unknown.
  """
  _check_known(implementation)
  pays = head_dim <= MAX_HEAD_DIM and has_kernels(device)
  wanted = implementation == "kernel" or (implementation == "auto" and pays)
  if wanted and new == 1:
    return "kernel"
  chosen = implementation in ("auto", "packed") and device.platform == "cpu"
  return "groups" if unit > 1 and chosen and new == 1 else "dense"


def _check_known(implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}"
    )


LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclasses.dataclass(frozen=True)
class Crossover:
  """Where packing begins to pay on a kind of device.

  Attributes:
    device: whole words of the device's kind, or its platform: "H100", "cpu".
    backend: what packs: "xla" or a back end of Pallas.
    dtypes: names of the queries' dtypes.
    head_dim: D, the largest that this holds for.
    causal: whether attention is causal; None is either.
    shares: the largest share of active heads, for each of `LENGTHS`.
    measured: False for a prediction, see benchmarks/predict.py.
  """

  device: str
  backend: str
  dtypes: Sequence[str]
  head_dim: int
  causal: bool | None
  shares: Sequence[float]
  measured: bool = False

  def line(self) -> str:
    """The entry as a line of crossovers.json."""
    return json.dumps(dataclasses.asdict(self))


# The first entry that holds for a call counts. On a CPU blocks are computed in
# float32, which 256 tokens of another dtype do not make up for.
CROSSOVERS = [
  Crossover(**entry)
  for entry in json.loads(
    pathlib.Path(__file__).with_name("crossovers.json").read_text()
  )
]


def largest_share(
  case: AttentionCase, backend: str, *, same_kernel: bool = False
) -> float:
  """The largest share of active heads at which packing pays.

  Args:
    case: the call.
    backend: what packs, as in `Crossover`.
    same_kernel: whether what packs would also compute every head. Then fewer
      heads are less work on any device, and one without entries of its own gets
      the smallest share of all that have some.

  Returns:
    The share, by linear interpolation in log N; 0 below the first length and
    where no entry holds.
  """
  entries = [
    entry
    for entry in CROSSOVERS
    if entry.backend == backend
    and case.dtype in entry.dtypes
    and case.head_dim <= entry.head_dim
    and entry.causal in (None, case.causal)
  ]
  for entry in entries:
    if entry.device == case.target.platform or case.target.is_a(entry.device):
      return _interpolate(case.queries, entry.shares)
  if not same_kernel:
    return 0.0
  shares = (_interpolate(case.queries, x.shares) for x in entries)
  return min(shares, default=0.0)


def _interpolate(queries: int, shares: tuple[float, ...]) -> float:
  logs = [math.log(x) for x in LENGTHS]
  return float(np.interp(math.log(queries), logs, shares, left=0.0))
