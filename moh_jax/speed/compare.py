"""Compiles the forms to compare, times them in turns, and makes report rows."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from moh_jax.ops.routing import HeadBudget
from moh_jax.speed import exactness, timing
from moh_jax.speed.options import DENSE_FORMS, HeadOptions
from moh_jax.speed.programs import Program, compile_program, default_loops
from moh_jax.speed.report import Row


@dataclasses.dataclass(frozen=True)
class Variant:
  """A program to compare with others, and what its report row needs.

  Attributes:
    implementation: form of attention, such as "dense" or "packed".
    share: active heads over all heads, in (0, 1].
    program: the compiled program to time.
    mha: whether it is multi-head attention, without a router.
    flops: FLOPs of one evaluation; None where they are not counted.
    max_error: error against the dense form; None where it is not measured.
    fault: which error exceeds its limit, in words; None if none does.
  """

  implementation: str
  share: float
  program: Program
  mha: bool = False
  flops: float | None = None
  max_error: float | None = None
  fault: str | None = None


def compile_forms(
  options: HeadOptions,
  budget: HeadBudget | None,
  evaluation: Callable[[str], Callable],
  args: Sequence[Any],
  *,
  flops: float,
  expected: Any = None,
  comparable: Callable[[Any], Any] = lambda found: found,
) -> list[Variant]:
  """Compiles every form for one head split, and measures its errors.

  Args:
    options: options of the command; they name the forms.
    budget: head split; None is multi-head attention, which has dense forms
      only.
    evaluation: maps the name of a form to a function of `args` that returns
      (outputs, gradients).
    args: arrays that every form evaluates.
    flops: FLOPs of one evaluation.
    expected: (outputs, gradients) that the forms should return; None takes
      those of the first form, "dense".
    comparable: selects what is compared from (outputs, gradients).
  """
  names = options.compared
  if budget is None:
    names = [name for name in names if name in DENSE_FORMS]
  share = 1.0 if budget is None else budget.share
  variants = []
  for name in names:
    program = compile_program(evaluation(name), *args, loops=default_loops())
    found = program.run()
    expected = found if expected is None else expected
    errors = exactness.compare(
      comparable(found), comparable(expected), options.dtype
    )
    variants.append(
      Variant(name, share, program, budget is None, flops, *errors)
    )
  return variants


def measure_heads(
  options: HeadOptions,
  op: str,
  variants: Callable[[str, int], list[Variant]],
  peak: float,
) -> list[Row]:
  """Measures the variants of every length and mode.

  Args:
    options: options of the command.
    op: what is computed, see `Row`.
    variants: makes the variants of a mode and a length.
    peak: the device's matrix peak, FLOP/s.
  """
  rows = []
  for length, mode in itertools.product(options.lengths, options.modes):
    rows += measure(
      variants(mode, length),
      op=op,
      mode=mode,
      length=length,
      units=options.batch * (1 if op == "decode" else length),
      rounds=options.rounds,
      peak=peak,
    )
  return rows


def measure_models(
  models: Mapping[str, Any],
  programs: Mapping[str, Program],
  *others: Variant,
  **options: Any,
) -> list[Row]:
  """Measures programs of variants of a model.

  Args:
    models: model sections by name of the form; "mha" is the baseline.
    programs: the program of each.
    *others: further programs to time with them.
    **options: of `measure`.
  """
  variants = [
    Variant(name, models[name].activated_share, program, name == "mha")
    for name, program in programs.items()
  ]
  return measure([*variants, *others], op="model", min_seconds=0.0, **options)


def measure(
  variants: Sequence[Variant],
  *,
  op: str,
  mode: str,
  length: int | None,
  units: int,
  rounds: int,
  peak: float | None = None,
  min_seconds: float = 0.005,
) -> list[Row]:
  """Times programs in turns and reports each as a row.

  Args:
    variants: the programs; at least one is multi-head attention.
    op: what they compute, see `Row`.
    mode: which passes they run, see `Row`.
    length: tokens of a sequence or slots of a cache; None for images.
    units: tokens or images of one evaluation.
    rounds: measured turns.
    peak: the device's matrix peak in FLOP/s; None where it is not measured.
    min_seconds: seconds that a turn lasts at least; shorter programs are
      repeated in it.

  Returns:
    A row for each variant; of the forms of multi-head attention only the
    fastest has one.
  """
  times = timing.interleaved(
    {str(i): variant.program.run for i, variant in enumerate(variants)},
    rounds,
    min_seconds,
  )
  timed = [
    (variant, time.median / variant.program.loops, time.spread)
    for variant, time in zip(variants, times.values())
  ]
  fastest = min((t for t in timed if t[0].mha), key=lambda t: t[1])
  rows = []
  for variant, seconds, spread in timed:
    if variant.mha and variant is not fastest[0]:
      continue
    dense = [
      other_seconds
      for other, other_seconds, _ in timed
      if other.implementation in DENSE_FORMS
      and (other.mha, other.share) == (variant.mha, variant.share)
    ]
    peak_share = None
    if peak and variant.flops is not None:
      peak_share = variant.flops / seconds / peak
    rows.append(
      Row(
        device=jax.devices()[0].device_kind,
        op=op,
        mode=mode,
        length=length,
        share=variant.share,
        implementation="mha" if variant.mha else variant.implementation,
        ms=seconds * 1e3,
        spread=spread,
        ratio_to_dense=seconds / min(dense) if dense else None,
        ratio_to_mha=seconds / fastest[1],
        units_per_second=units / seconds,
        flops=variant.flops,
        peak_share=peak_share,
        peak_bytes=variant.program.bytes,
        max_error=variant.max_error,
        fault=variant.fault,
      )
    )
  return rows
