"""Times attention, and what benchmarks of heads share.

Shapes: B batch, N tokens, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.cli.head_options import HeadOptions
from moh_jax.cli.options import Output, table
from moh_jax.config.heads import HeadBudget
from moh_jax.ops.attention import attention, choose_form
from moh_jax.ops.attention_forms import AttentionCase, Call, Form, Visible
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.routing import top_k_mask
from moh_jax.ops.target import target
from moh_jax.training import bench as bench_lib
from moh_jax.training import timing
from moh_jax.training.bench import Row
from moh_jax.training.flops import attention_flops, passes

# Forms that can compute every head as well: the baselines of the others.
_EVERY_HEAD = ("dense", "auto", "cudnn", "kernel")


def report(options: Output, result: dict[str, Any]) -> int:
  """Gives a result with the machine; 1 if any of its "rows" has a fault.

  Args:
    options: of the command.
    result: of `run_heads`, or of a model.
  """
  rows: Sequence[Row] = result["rows"]
  stored = [dataclasses.asdict(row) for row in rows]
  machine = {"machine": timing.machine()}
  options.give({**machine, **result, "rows": stored}, _lines(result))
  for row in rows:
    if row.fault:
      print(f"error: {row.name}: {row.fault}", file=sys.stderr)
  return 1 if any(row.fault for row in rows) else 0


def _lines(result: dict[str, Any]) -> Iterator[str]:
  if result["rows"]:
    yield table(*bench_lib.table_cells(result["rows"]))
  if "matrix_peak" in result:
    peak, dtype = result["matrix_peak"], result["settings"]["dtype"]
    yield f"matrix peak: {peak / 1e9:,.1f} GFLOP/s ({dtype})"
  if result.get("memory_peak"):
    yield f"memory peak: {result['memory_peak'] / 1e9:,.1f} GB/s"
  for part in ("train_step", "sampler"):
    for name, value in result.get(part, {}).items():
      yield f"{part} {name}: {value:,.3f}".rstrip("0").rstrip(".")


def run_heads(options: HeadOptions, *benchmark: Any) -> dict[str, Any]:
  """Measures heads, and the device's peaks to judge them by.

  Args:
    options: of the benchmark.
    *benchmark: the other arguments of `compare_forms`.
  """
  with bench_lib.exact_products(options.dtype):
    # Before and after: a phase may be slow.
    first = bench_lib.matrix_peak(options.dtype)
    rows = compare_forms(options, *benchmark)
    last = bench_lib.matrix_peak(options.dtype)
    rates = [row.rate for row in rows if row.rate]
    peaks = {
      "matrix_peak": max(first, last, *rates),
      "memory_peak": bench_lib.memory_peak(),
    }
  rows = bench_lib.with_peaks(rows, *peaks.values())
  return {**peaks, "settings": options.values(), "rows": rows}


@dataclasses.dataclass(frozen=True)
class Split:
  """What the forms of attention with one head split have in common.

  Attributes:
    budget: the head split; None is multi-head attention, where every head is
      computed.
    form: maps a name to the form that the library chooses.
    evaluation: maps it to a function of `args` that returns (outputs,
      gradients).
    args: arrays that every form evaluates.
    flops: FLOPs of one evaluation, of the active heads.
    moved: maps whether a form packs to the least bytes that it moves.
    expected: returns what all forms should.
    comparable: selects what is compared from (outputs, gradients).
  """

  budget: HeadBudget | None
  form: Callable[[str], Form]
  evaluation: Callable[[str], Callable]
  args: Sequence[Any]
  flops: float
  expected: Callable[[], Any]
  moved: Callable[[bool], float | None] = lambda packs: None
  comparable: Callable[[Any], Any] = lambda found: found

  @property
  def share(self) -> float:
    """Active heads over all heads."""
    return 1.0 if self.budget is None else self.budget.share


def compare_forms(
  options: HeadOptions,
  op: str,
  splits: Callable[[Any, str, int], Iterable[Split]],
  check: Callable[[Any, str], None],
) -> list[Row]:
  """Compares forms of attention with multi-head attention.

  A form that fails has a fault in place of a time.

  Args:
    options: of the benchmark.
    op: what is computed, see `Row`.
    splits: makes what is compared for options, a mode and a length, multi-head
      attention first.
    check: raises ValueError if the device or the options rule out a form.
  """
  for name in options.implementations or ():
    _check_form(options, name, check)
  names = [
    name
    for name in options.FORMS
    if not isinstance(
      bench_lib.attempt(_check_form, options, name, check), Exception
    )
  ]
  baselines = [name for name in _EVERY_HEAD if name in names]
  compared = options.implementations or [n for n in names if n != "dense"]
  rows = []
  for length, mode in itertools.product(options.lengths, options.modes):
    entries: list[tuple[Split, str, Form]] = []
    for split in splits(options, mode, length):
      if split.budget is None:  # of equal forms the first
        first: dict[Form, str] = {}
        for name in baselines:
          first.setdefault(split.form(name), name)
        entries += [(split, name, form) for form, name in first.items()]
      else:
        entries += [(split, name, split.form(name)) for name in compared]
    here = {"op": op, "mode": mode, "length": length}
    rows += _measure(options, here, entries)
  return rows


def _check_form(options: HeadOptions, name: str, check: Callable) -> None:
  if name in ("kernel", "cudnn") and target().platform == "cpu":
    raise ValueError(
      f"--implementations {name} needs an accelerator, this is a CPU"
    )
  check(options, name)


def _measure(
  options: HeadOptions,
  here: dict[str, Any],
  entries: Sequence[tuple[Split, str, Form]],
) -> list[Row]:
  """Compiles forms, measures their errors, and times them in turns."""
  loops = bench_lib.default_loops(max(split.flops for split, *_ in entries))
  rows, programs, current, expected = [], [], None, None
  for split, name, form in entries:
    program = error = fault = None
    try:
      program = bench_lib.compile_program(
        split.evaluation(name), *split.args, loops=loops
      )
      found = program.run()
      if split is not current:
        current, expected = split, split.comparable(split.expected())
      error, fault = bench_lib.check_exact(
        split.comparable(found), expected, options.dtype
      )
    except Exception as reason:  # compilers and drivers share no error class
      program, fault = None, bench_lib.failure(reason)
    programs.append(program)
    moved = split.moved(form.packs)
    computed = split.share if form.packs else 1.0
    rows.append(
      Row(
        device=target().kind,
        **here,
        share=split.share,
        implementation=name,
        form=form.name,
        computed_share=computed,
        every_head=computed == 1,
        flops=split.flops,
        moved_bytes=None if moved is None else round(moved),
        moved_by="" if moved is None else "count",
        max_error=error,
        fault=fault,
      )
    )
  tokens = 1 if here["op"] == "decode" else here["length"]
  return bench_lib.time_rows(
    rows,
    programs,
    mha=[i for i, (split, *_) in enumerate(entries) if split.budget is None],
    units=options.batch * tokens,
    rounds=options.rounds,
  )


def check_shapes(options: HeadOptions, name: str) -> None:
  """Traces attention, which raises what compiling it would raise."""
  for length in options.lengths:
    for causal in {"causal" in mode for mode in options.modes}:
      shape = (options.batch, length, options.heads)
      mask = jax.ShapeDtypeStruct(shape, bool)
      active = ActiveHeads(mask, options.budgets()[0].active)
      q = jax.ShapeDtypeStruct((*shape, options.head_dim), options.dtype)
      groups = (*shape[:2], options.num_kv_heads, options.head_dim)
      k = jax.ShapeDtypeStruct(groups, options.dtype)
      attend = functools.partial(attention, causal=causal, implementation=name)
      jax.eval_shape(attend, q, k, k, active=active)


def chosen_form(
  options: HeadOptions, mode: str, length: int, share: float, name: str
) -> Form:
  """The form that the library chooses for a benchmark's arrays.

  Args:
    options: of the benchmark.
    mode: one of its modes.
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


def splits(options: HeadOptions, mode: str, length: int) -> Iterable[Split]:
  """Attention of all heads, and of each of the shares."""
  batch, heads, dim = options.batch, options.heads, options.head_dim
  groups = options.num_kv_heads

  *qkv, cotangent = (
    jax.random.normal(key, (batch, length, count, dim), options.dtype)
    for key, count in zip(
      jax.random.split(jax.random.key(0), 4), (heads, groups, groups, heads)
    )
  )
  reference = make_reference(mode)

  def moved(pairs: int, packs: bool) -> float:
    """Queries, keys, values and outputs once a pass."""
    computed = pairs if packs else batch * length * heads
    numbers = passes(mode) * 2 * (computed + batch * length * groups)
    return numbers * dim * jnp.dtype(options.dtype).itemsize

  for budget in (None, *options.budgets()):
    share = 1.0 if budget is None else budget.share
    active = mask = None
    arrays = *qkv, cotangent, None
    if budget is not None:
      active = random_active(budget, batch, length)
      mask = active.mask
      # Inactive heads have a gate of 0, so they receive no gradient.
      arrays = *qkv, jnp.where(mask[..., None], cotangent, 0), active
    pairs = round(batch * length * heads * share)
    yield Split(
      budget,
      form=functools.partial(chosen_form, options, mode, length, share),
      evaluation=functools.partial(_evaluation, mode=mode),
      args=arrays,
      flops=attention_flops(pairs, length, dim, mode),
      moved=functools.partial(moved, pairs),
      expected=functools.partial(reference, *arrays[:4]),
      comparable=functools.partial(_without_inactive, mask=mask),
    )


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
    mode: passes that run, see `HeadOptions`.

  Returns:
    A function (q, k, v, cotangent) -> (outputs, gradients); modes without a
    backward pass need no cotangent.
  """

  @jax.checkpoint
  def head(qkv):
    q, k, v = (x[:, :, None] for x in qkv)
    visible = Visible(causal="causal" in mode)
    out = dense_attention(Call(q, k, v, visible, q.shape[-1] ** -0.5))
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
  found: tuple[Any, Any], mask: jax.Array | None
) -> tuple[Any, Any]:
  """Sets the outputs of inactive heads, which are undefined, to zero."""
  if mask is None:
    return found
  return jnp.where(mask[..., None], found[0], 0), found[1]
