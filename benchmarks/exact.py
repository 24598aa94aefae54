"""Measures how exact forms of attention are, against the dense one in float32.

  python -m benchmarks.exact --forms packed,kernel --dtype bfloat16

Half of eight heads are active; all tokens see one another, or those before, or
those of their document, or share key/value heads. A form that the device or the
shapes rule out is left out.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention import random_active
from benchmarks.common import attempt, finish, make_parser
from benchmarks.rows import check_exact, exact_products, failure
from moh_jax.config.base import DTYPES
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.ops.attention import attention, kernels_of
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.target import target

_BATCH, _HEADS = 2, 8
# Key/value heads, causal, documents in a sequence.
CASES = {
  "bidirectional": (_HEADS, False, False),
  "causal": (_HEADS, True, False),
  "segments": (_HEADS, True, True),
  "grouped": (2, True, False),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the errors; 1 if one is above its limit or a form does not run."""
  parser = make_parser(__doc__)
  parser.add_argument("--forms", default="dense,packed,kernel,cudnn")
  parser.add_argument("--dtype", choices=DTYPES, default="float32")
  parser.add_argument("--head-dim", type=int, default=64, help="head dim, D")
  parser.add_argument(
    "--tokens", type=int, default=512, help="tokens of a sequence"
  )
  args = parser.parse_args(argv)
  shape, forms = (args.tokens, args.dtype, args.head_dim), args.forms.split(",")
  checks = [row for case in CASES for row in measure(case, *shape, forms)]
  finish(args, checks, settings=vars(args))
  faults = [check for check in checks if check["fault"]]
  for form, case, _, fault in (check.values() for check in faults):
    print(f"error: {form}, {case}: {fault}", file=sys.stderr)
  return 1 if faults else 0


def measure(
  case: str, tokens: int, dtype: str, head_dim: int, forms: Sequence[str]
) -> list[dict[str, Any]]:
  """Measures the errors of outputs and gradients of forms.

  Args:
    case: one of `CASES`.
    tokens: tokens of a sequence.
    dtype: of queries, keys and values.
    head_dim: D.
    forms: of `IMPLEMENTATIONS`.

  Returns:
    {"form", "case", "max_error", "fault"} of each form.
  """
  arrays = _arrays(tokens, dtype, head_dim, case)
  *qkv, cotangent, active, segments = arrays
  causal = CASES[case][1]
  with jax.default_matmul_precision("highest"):
    wide = [x.astype(jnp.float32) for x in (*qkv, cotangent)]
    expected = jax.jit(_evaluation(_dense, causal))(*wide, active, segments)
  checks = []
  for form in forms:
    run = _evaluation(attention, causal, implementation=form)
    with exact_products(dtype):
      traced = attempt(jax.eval_shape, run, *arrays)
      if not _has(form, dtype, head_dim) or isinstance(traced, ValueError):
        continue
      found = attempt(jax.jit(run), *arrays)
    if not isinstance(found, Exception):
      found = attempt(check_exact, found, expected, dtype)
    if isinstance(found, Exception):
      found = None, failure(found)
    names = ("form", "case", "max_error", "fault")
    checks.append(dict(zip(names, (form, case, *found))))
  return checks


def _has(form: str, dtype: str, head_dim: int) -> bool:
  """Whether the device has a form; a CPU would interpret kernels, slowly."""
  if form == "cudnn":
    return target().platform == "gpu"
  device = target()
  able = not kernels_of(device).unable(device, dtype, head_dim)
  return form != "kernel" or (able and device.platform != "cpu")


def _arrays(tokens: int, dtype: str, head_dim: int, case: str) -> tuple:
  """Queries, keys, values; cotangent; active heads; segments or None."""
  kv_heads, _, documents = CASES[case]
  q, k, v, cotangent = (
    jax.random.normal(key, (_BATCH, tokens, count, head_dim), dtype)
    for key, count in zip(
      jax.random.split(jax.random.key(0), 4),
      (_HEADS, kv_heads, kv_heads, _HEADS),
    )
  )
  active = random_active(
    Units(HeadBudget(_HEADS, 2, 2, head_dim)), _BATCH, tokens
  )
  cotangent = jnp.where(active.mask[..., None], cotangent, 0)
  third = jnp.arange(tokens, dtype=jnp.int32) * 3 // tokens
  segments = jnp.tile(third, (_BATCH, 1)) if documents else None
  return q, k, v, cotangent, active, segments


def _dense(q, k, v, *, active, max_active, segments, causal):
  del active, max_active
  visible = Visible(segments=segments, causal=causal)
  return dense_attention(Call(q, k, v, visible, q.shape[-1] ** -0.5))


def _evaluation(attend: Callable, causal: bool, **options: Any) -> Callable:
  """Makes what gives (outputs of active heads, gradients of q, k and v)."""

  def run(q, k, v, cotangent, active: ActiveHeads, segments):
    def outputs(q, k, v):
      heads = {"active": active.mask, "max_active": active.max_per_token}
      return attend(
        q, k, v, segments=segments, causal=causal, **heads, **options
      )

    out, pull = jax.vjp(outputs, q, k, v)
    return jnp.where(active.mask[..., None], out, 0), pull(cotangent)

  return run


if __name__ == "__main__":
  sys.exit(main())
