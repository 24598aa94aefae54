"""Benchmark of attention alone, from given queries, keys and values.

Shapes: B batch, N tokens, H query heads, K key/value heads, D head dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention, choose_form
from moh_jax.ops.attention_forms import AttentionCase, Form
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.routing import top_k_mask
from moh_jax.ops.target import target
from moh_jax.ops.visible import Visible
from moh_jax.speed import compare
from moh_jax.speed.compare import Contest, Variant
from moh_jax.speed.options import SequenceOptions
from moh_jax.speed.programs import is_absent, make_arrays
from moh_jax.speed.report import Row


def attention_flops(
  pairs: int, keys: int, head_dim: int, mode: str = "forward"
) -> float:
  """FLOPs of the two products of attention, logits and mixed values.

  A (token, head) pair that sees M keys takes 2 M D FLOPs for each product.
  Causal token n of N sees n + 1 keys, (N + 1) / 2 on average. The backward pass
  has two products for each one of the forward pass, so both passes together
  take three times the forward pass; recomputation is not counted. For example,
  1,000 pairs, 512 keys and head dim 64 take 131 MFLOP forward.

  Args:
    pairs: number of active (token, head) pairs.
    keys: keys of a sequence, M.
    head_dim: head dim, D.
    mode: one of `options.MODES`.
  """
  seen = (keys + 1) / 2 if "causal" in mode else keys
  return 4 * pairs * seen * head_dim * passes(mode)


def passes(mode: str) -> int:
  """Products that a mode computes over those of one forward pass: 1 or 3."""
  return 3 if "backward" in mode else 1


def attention_bytes(
  pairs: int, keys: int, head_dim: int, itemsize: int, mode: str = "forward"
) -> float:
  """Least bytes that attention reads and writes.

  Forward, each (token, head) pair has a query and an output, and each of the
  batch's (key, head) pairs a key and a value. The backward pass reads these
  again with the output's cotangent, and writes three gradients.

  Args:
    pairs: (token, head) pairs that are computed.
    keys: (key, key/value head) pairs of the batch.
    head_dim: head dim, D.
    itemsize: bytes of a number.
    mode: one of `options.MODES`.
  """
  numbers = passes(mode) * 2 * (pairs + keys)
  return numbers * head_dim * itemsize


def chosen_form(
  options: SequenceOptions,
  mode: str,
  length: int,
  share: float,
  name: str,
) -> Form:
  """The form that the library chooses for a benchmark's arrays.

  Args:
    options: options of the benchmark.
    mode: one of `options.MODES`.
    length: tokens of a sequence.
    share: active heads over all heads; 1 where every head is computed.
    name: the implementation that is asked for.
  """
  case = AttentionCase(
    target=target(),
    batch=options.batch,
    queries=length,
    keys=length,
    num_heads=options.heads,
    head_dim=options.head_dim,
    share=share,
    causal="causal" in mode,
    dtype=options.dtype,
  )
  return choose_form(name, case)


def random_active(budget: HeadBudget, batch: int, tokens: int) -> ActiveHeads:
  """Samples active heads [B, N, H]: each routed head is equally likely."""
  scores = jax.random.normal(jax.random.key(3), (batch, tokens, budget.routed))
  shared = jnp.ones((batch, tokens, budget.shared), bool)
  mask = jnp.concatenate([shared, top_k_mask(scores, budget.top_k)], axis=-1)
  return ActiveHeads(mask, budget.active)


def measure(options: SequenceOptions) -> list[Row]:
  """Compares forms of attention with multi-head attention.

  Args:
    options: options of `bench attention`.
  """
  variants = functools.partial(_variants, options)
  return compare.measure_heads(options, "attention", variants)


def _random_arrays(options: SequenceOptions, length: int) -> list[jax.Array]:
  """Queries [B, N, H, D], keys, values [B, N, K, D], cotangent [B, N, H, D]."""
  heads, groups = options.heads, options.num_kv_heads
  keys = jax.random.split(jax.random.key(0), 4)
  return [
    jax.random.normal(
      key, (options.batch, length, count, options.head_dim), options.dtype
    )
    for key, count in zip(keys, (heads, groups, groups, heads))
  ]


def _variants(
  options: SequenceOptions, mode: str, length: int
) -> list[Variant]:
  *qkv, cotangent = make_arrays(lambda: _random_arrays(options, length))
  shape, dim = cotangent.shape[:3], options.head_dim
  every_pair, keys = cotangent.size // dim, qkv[1].size // dim
  itemsize = jnp.dtype(options.dtype).itemsize
  reference = make_reference(mode)

  def moved(pairs: int, packs: bool) -> float:
    computed = pairs if packs else every_pair
    return attention_bytes(computed, keys, dim, itemsize, mode)

  contests = []
  for budget in (None, *options.budgets()):
    share = 1.0 if budget is None else budget.share
    active = make_arrays(functools.partial(_active, budget, shape))
    arrays = *qkv, cotangent, active
    pairs, comparable = round(every_pair * share), lambda found: found
    if not is_absent():
      mask = jnp.ones(shape, bool) if active is None else active.mask
      # Inactive heads have a gate of 0, so they receive no gradient.
      arrays = *qkv, jnp.where(mask[..., None], cotangent, 0), active
      comparable = functools.partial(_without_inactive, mask=mask)
    contests.append(
      Contest(
        budget,
        form=functools.partial(chosen_form, options, mode, length, share),
        evaluation=functools.partial(_evaluation, mode=mode),
        args=arrays,
        flops=attention_flops(pairs, length, dim, mode),
        moved=functools.partial(moved, pairs),
        expected=lambda _, arrays=arrays: reference(*arrays[:4]),
        comparable=comparable,
      )
    )
  return compare.compile_forms(options, contests)


def _active(budget: HeadBudget | None, shape: tuple) -> ActiveHeads | None:
  return None if budget is None else random_active(budget, *shape[:2])


def _evaluation(name: str, *, mode: str) -> Callable:
  """Makes the function (q, k, v, cotangent, active) -> (outputs, gradients)."""

  def run(q, k, v, cotangent, active):
    attend = functools.partial(
      attention,
      active=active,
      causal="causal" in mode,
      implementation=name,
    )
    return _evaluate(attend, mode, (q, k, v), cotangent)

  return run


def make_reference(mode: str) -> Callable:
  """Makes the dense form in float32, computed head by head to save memory.

  Args:
    mode: one of `options.MODES`.

  Returns:
    A function (q, k, v, cotangent) -> (outputs, gradients); modes without a
    backward pass need no cotangent.
  """

  @jax.checkpoint
  def head(qkv):
    q, k, v = (x[:, :, None] for x in qkv)
    visible = Visible(causal="causal" in mode)
    out = dense_attention(q, k, v, None, visible, q.shape[-1] ** -0.5)
    return out[:, :, 0]

  def attend(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    heads_first = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v))
    return jnp.moveaxis(jax.lax.map(head, heads_first), 0, 2)

  @jax.jit
  def run(q, k, v, cotangent=None):
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, cotangent))
    with jax.default_matmul_precision("highest"):
      return _evaluate(attend, mode, arrays[:3], arrays[3])

  return run


def _evaluate(
  attend: Callable, mode: str, qkv: tuple, cotangent: jax.Array
) -> tuple[Any, Any]:
  """Returns the output, and the gradients of q, k and v in backward modes."""
  if "backward" not in mode:
    return attend(*qkv), ()
  out, pull = jax.vjp(attend, *qkv)
  return out, pull(cotangent)


def _without_inactive(
  found: tuple[Any, Any], mask: jax.Array
) -> tuple[Any, Any]:
  """Sets the outputs of inactive heads, which are undefined, to zero."""
  return jnp.where(mask[..., None], found[0], 0), found[1]
