"""Exactness of every form of attention against the dense form in float32."""

import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.visible import Visible
from moh_jax.speed import exactness
from moh_jax.speed.attention import random_active
from moh_jax.speed.programs import exact_products

_BATCH = 2
_HEADS = 8
# Key/value heads, causal, documents in a sequence.
CASES = {
  "bidirectional": (_HEADS, False, False),
  "causal": (_HEADS, True, False),
  "segments": (_HEADS, True, True),
  "grouped": (2, True, False),
}


def measure(tokens: int, dtype: str, head_dim: int) -> dict[str, Any]:
  """Measures the errors of outputs and gradients of every form.

  Half of eight heads are active. A form that the device or the shapes rule out
  is left out; one that fails has a fault.

  Args:
    tokens: tokens of a sequence.
    dtype: of queries, keys and values.
    head_dim: D.

  Returns:
    {"checks": [{"form", "case", "max_error", "fault"}]}.
  """
  checks = []
  for case in CASES:
    with exact_products(dtype):
      checks += _check(case, tokens, dtype, head_dim)
  return {"checks": checks}


def _check(
  case: str, tokens: int, dtype: str, head_dim: int
) -> list[dict[str, Any]]:
  kv_heads, causal, documents = CASES[case]
  keys = jax.random.split(jax.random.key(0), 4)
  counts = _HEADS, kv_heads, kv_heads, _HEADS
  q, k, v, cotangent = (
    jax.random.normal(key, (_BATCH, tokens, count, head_dim), dtype)
    for key, count in zip(keys, counts)
  )
  budget = HeadBudget(_HEADS, 2, 2, head_dim)
  active = random_active(budget, _BATCH, tokens)
  cotangent = jnp.where(active.mask[..., None], cotangent, 0)
  segments = None
  if documents:
    third = jnp.arange(tokens, dtype=jnp.int32) * 3 // tokens
    segments = jnp.tile(third, (_BATCH, 1))
  visible = Visible(segments=segments, causal=causal)

  def dense(q, k, v):
    return dense_attention(q, k, v, None, visible, head_dim**-0.5)

  exact = [x.astype(jnp.float32) for x in (q, k, v, cotangent)]
  with jax.default_matmul_precision("highest"):
    expected = _evaluate(dense, active, *exact)
  checks = []
  for form in IMPLEMENTATIONS:

    def attend(q, k, v, form=form):
      return attention(
        q,
        k,
        v,
        segments=segments,
        causal=causal,
        active=active,
        implementation=form,
      )

    if form == "kernel" and jax.default_backend() == "cpu":
      continue  # it would be interpreted, in minutes
    try:
      jax.eval_shape(attend, q, k, v)
    except ValueError:  # not for this device or these shapes
      continue
    try:
      found = _evaluate(attend, active, q, k, v, cotangent)
      error, fault = exactness.compare(found, expected, dtype)
    except Exception as reason:  # compilers and drivers share no error class
      why = textwrap.shorten(f"{type(reason).__name__}: {reason}", 300)
      error, fault = None, f"does not run: {why}"
    checks.append(
      {"form": form, "case": case, "max_error": error, "fault": fault}
    )
  return checks


def _evaluate(attend: Any, active: ActiveHeads, q, k, v, cotangent) -> tuple:
  """Outputs of the active heads, and the gradients of q, k and v."""

  @jax.jit
  def run(q, k, v, cotangent):
    out, pull = jax.vjp(attend, q, k, v)
    return jnp.where(active.mask[..., None], out, 0), pull(cotangent)

  return run(q, k, v, cotangent)
