"""Exactness of every form of attention against the dense form in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.visible import Visible
from moh_jax.speed import exactness, programs
from moh_jax.speed.attention import random_active

_BATCH = 2
_HEADS = 8
# Key/value heads, causal, documents in a sequence.
CASES = {
  "bidirectional": (_HEADS, False, False),
  "causal": (_HEADS, True, False),
  "segments": (_HEADS, True, True),
  "grouped": (2, True, False),
}


def measure(
  tokens: int, dtype: str, head_dim: int, forms: tuple[str, ...]
) -> dict[str, Any]:
  """Measures the errors of outputs and gradients of forms.

  Half of eight heads are active. A form that the device or the shapes rule out
  is left out; one that fails has a fault.

  Args:
    tokens: tokens of a sequence.
    dtype: of queries, keys and values.
    head_dim: D.
    forms: of `IMPLEMENTATIONS`.

  Returns:
    {"checks": [{"form", "case", "max_error", "fault"}]}.
  """
  lowered, names = [], []
  for case, (kv_heads, causal, documents) in CASES.items():
    qkv, cotangent, active, segments = _arrays(
      tokens, dtype, head_dim, kv_heads, documents
    )
    arrays = *qkv, cotangent, active, segments
    wide = [x.astype(jnp.float32) for x in (*qkv, cotangent)]
    with jax.default_matmul_precision("highest"):
      reference = _evaluation(_dense, causal)
      lowered.append(programs.lower_program(reference, *wide, active, segments))
    names.append((case, ""))
    for form in forms:
      run = _evaluation(attention, causal, implementation=form)
      with programs.exact_products(dtype):
        if not _is_possible(run, arrays):
          continue
        lowered.append(programs.try_lowering(run, *arrays))
      names.append((case, form))
  checks, expected = [], None
  for (case, form), program in zip(names, programs.finish_all(lowered)):
    error = fault = None
    try:
      if isinstance(program, Exception):
        raise program
      found = program.run()
      if form:
        error, fault = exactness.compare(found, expected, dtype)
      else:
        expected = found
    except Exception as reason:  # compilers and drivers share no error class
      if not form:
        raise
      fault = programs.failure(reason)
    if form:
      checks.append(
        {"form": form, "case": case, "max_error": error, "fault": fault}
      )
  return {"checks": checks}


def _is_possible(run: Callable, arrays: tuple) -> bool:
  """Whether a form is for the device and the shapes, though it may fail."""
  try:
    jax.eval_shape(run, *arrays)
  except ValueError:
    return False
  except Exception:  # a fault of the form, which lowering gives again
    return True
  return True


def _arrays(
  tokens: int, dtype: str, head_dim: int, kv_heads: int, documents: bool
) -> tuple:
  """Queries, keys and values; cotangent; active heads; segments or None."""
  q, k, v, cotangent = (
    jax.random.normal(key, (_BATCH, tokens, count, head_dim), dtype)
    for key, count in zip(
      jax.random.split(jax.random.key(0), 4),
      (_HEADS, kv_heads, kv_heads, _HEADS),
    )
  )
  active = random_active(HeadBudget(_HEADS, 2, 2, head_dim), _BATCH, tokens)
  cotangent = jnp.where(active.mask[..., None], cotangent, 0)
  segments = None
  if documents:
    third = jnp.arange(tokens, dtype=jnp.int32) * 3 // tokens
    segments = jnp.tile(third, (_BATCH, 1))
  return (q, k, v), cotangent, active, segments


def _dense(q, k, v, *, active, segments, causal):
  del active
  visible = Visible(segments=segments, causal=causal)
  return dense_attention(q, k, v, None, visible, q.shape[-1] ** -0.5)


def _evaluation(attend: Callable, causal: bool, **options: Any) -> Callable:
  """Makes what gives (outputs of active heads, gradients of q, k and v)."""

  def run(q, k, v, cotangent, active: ActiveHeads, segments):
    def outputs(q, k, v):
      return attend(
        q, k, v, active=active, segments=segments, causal=causal, **options
      )

    out, pull = jax.vjp(outputs, q, k, v)
    return jnp.where(active.mask[..., None], out, 0), pull(cotangent)

  return run
