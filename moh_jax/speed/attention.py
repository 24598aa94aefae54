"""The core of attention alone: queries, keys and values that are there.

Shapes: B batch, N tokens, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.routing import top_k_mask
from moh_jax.ops.visible import Visible
from moh_jax.speed import compare, exactness
from moh_jax.speed.compare import Variant, setting_of
from moh_jax.speed.options import DENSE_FORMS, SequenceOptions
from moh_jax.speed.programs import compile_program, default_loops
from moh_jax.speed.report import Row


def attention_flops(
  pairs: int, keys: int, head_dim: int, mode: str = "forward"
) -> float:
  """FLOPs of the two products of attention, logits and mixed values.

  A (token, head) pair that sees M keys takes 2 M D for each product. Causal
  token n of N sees n + 1 keys, (N + 1) / 2 on average. The backward pass has
  two products for each one of the forward pass, so both passes take three times
  the forward pass; what is computed again is not counted.

  Args:
    pairs: (token, head) pairs at work.
    keys: of a sequence.
    head_dim: D.
    mode: of `options.MODES`.
  """
  seen = (keys + 1) / 2 if "causal" in mode else keys
  return 4 * pairs * seen * head_dim * passes(mode)


def passes(mode: str) -> int:
  """Forward passes that a mode's products are worth."""
  return 3 if "backward" in mode else 1


def random_active(budget: HeadBudget, batch: int, tokens: int) -> ActiveHeads:
  """Heads at work where every routed head is as likely, [B, N, H]."""
  scores = jax.random.normal(jax.random.key(3), (batch, tokens, budget.routed))
  shared = jnp.ones((batch, tokens, budget.shared), bool)
  mask = jnp.concatenate([shared, top_k_mask(scores, budget.top_k)], axis=-1)
  return ActiveHeads(mask, budget.active)


def measure(options: SequenceOptions, peak: float) -> list[Row]:
  """Compares forms of attention with dense and multi-head attention.

  Args:
    options: what to compare.
    peak: the device's matrix peak, FLOP/s.
  """
  rows = []
  for length in options.lengths:
    inputs = _inputs(options, length)
    for mode in options.modes:
      setting = setting_of(
        options, "attention", mode, length, peak, units=options.batch * length
      )
      rows += compare.measure(setting, _variants(options, mode, inputs))
  return rows


@dataclasses.dataclass(frozen=True)
class _Inputs:
  """Random: q and the output's cotangent [B, N, H, D], k and v [B, N, K, D]."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  cotangent: jax.Array


def _inputs(options: SequenceOptions, length: int) -> _Inputs:
  heads, groups = options.heads, options.num_kv_heads
  keys = jax.random.split(jax.random.key(0), 4)
  return _Inputs(
    *(
      jax.random.normal(
        key, (options.batch, length, count, options.head_dim), options.dtype
      )
      for key, count in zip(keys, (heads, groups, groups, heads))
    )
  )


def _variants(
  options: SequenceOptions, mode: str, inputs: _Inputs
) -> list[Variant]:
  compared = options.compared
  reference = _reference(mode)
  variants = []
  for budget in (None, *options.budgets()):
    batch, tokens = inputs.q.shape[:2]
    mask = jnp.ones(inputs.q.shape[:3], bool)
    active, names = None, [name for name in compared if name in DENSE_FORMS]
    if budget is not None:
      active, names = random_active(budget, batch, tokens), compared
      mask = active.mask
    # The gates of the other heads are 0, so nothing comes back from them.
    cotangent = jnp.where(mask[..., None], inputs.cotangent, 0)
    arrays = inputs.q, inputs.k, inputs.v
    expected = reference(*arrays, cotangent)
    share = 1.0 if budget is None else budget.share
    flops = attention_flops(
      round(mask.size * share), tokens, options.head_dim, mode
    )
    for name in names:
      program = compile_program(
        _evaluation(name, mode),
        *arrays,
        cotangent,
        active,
        loops=default_loops(),
      )
      errors = exactness.compare(
        _at_work(program.run(), mask), _at_work(expected, mask)
      )
      variants.append(
        Variant(name, share, program, budget is None, flops, errors)
      )
  return variants


def _evaluation(name: str, mode: str) -> Callable:
  """(q, k, v, cotangent, active) -> (outputs, gradients)."""

  def run(q, k, v, cotangent, active):
    attend = functools.partial(
      attention, active=active, causal="causal" in mode, implementation=name
    )
    return _evaluate(attend, mode, (q, k, v), cotangent)

  return run


def _reference(mode: str) -> Callable:
  """The dense form in float32, a head at a time to save memory."""

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
  def run(q, k, v, cotangent):
    q, k, v, cotangent = (x.astype(jnp.float32) for x in (q, k, v, cotangent))
    with jax.default_matmul_precision("highest"):
      return _evaluate(attend, mode, (q, k, v), cotangent)

  return run


def _evaluate(
  attend: Callable, mode: str, qkv: tuple, cotangent: jax.Array
) -> tuple[Any, Any]:
  """Outputs, and gradients of q, k and v where the mode has them."""
  if "backward" not in mode:
    return attend(*qkv), ()
  out, pull = jax.vjp(attend, *qkv)
  return out, pull(cotangent)


def _at_work(found: tuple[Any, Any], mask: jax.Array) -> tuple[Any, Any]:
  """Leaves out the outputs of other heads, which are not defined."""
  return jnp.where(mask[..., None], found[0], 0), found[1]
