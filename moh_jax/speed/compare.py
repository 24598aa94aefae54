"""Compiles the forms to compare, times them in turns, and makes report rows."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moh_jax.ops.attention_forms import Form
from moh_jax.ops.routing import HeadBudget
from moh_jax.ops.target import target
from moh_jax.speed import exactness, programs, timing
from moh_jax.speed.options import HeadOptions
from moh_jax.speed.programs import Program
from moh_jax.speed.report import Row


@dataclasses.dataclass(frozen=True)
class Variant:
  """A program to compare with others, and what its report row needs.

  Attributes:
    implementation: form of attention, such as "dense" or "packed".
    share: active heads over all heads, in (0, 1].
    program: the compiled program to time; None if it could not be compiled.
    mha: whether it is multi-head attention, without a router.
    baseline: whether it stands for the forms that compute every head.
    packs: whether it computes the active heads only; None where it is unknown.
    flops: FLOPs of one evaluation; None where they are not counted.
    moved: least bytes that one evaluation reads and writes, counted from the
      shapes; None where they are not counted.
    max_error: error against the dense form; None where it is not measured.
    fault: which error exceeds its limit, or why it did not run, in words; None
      if nothing is wrong.
  """

  implementation: str
  share: float
  program: Program | None
  mha: bool = False
  baseline: bool = False
  packs: bool | None = None
  flops: float | None = None
  moved: float | None = None
  max_error: float | None = None
  fault: str | None = None


@dataclasses.dataclass(frozen=True)
class Contest:
  """What the forms of one head split have in common.

  Attributes:
    budget: the head split; None is multi-head attention, where every head is
      computed.
    routed_baselines: whether a form that computes every head costs more with
      this budget than without a router, so that it is measured here too.
    form: maps (name, whether every head is asked for) to the form that the
      library chooses.
    evaluation: maps the same to a function of `args` that returns (outputs,
      gradients).
    args: arrays that every form evaluates.
    flops: FLOPs of one evaluation, of the active heads.
    moved: maps whether a form packs to the least bytes that it moves.
    expected: maps the (outputs, gradients) of the first form, which computes
      every head, to those that all should return.
    comparable: selects what is compared from (outputs, gradients).
  """

  budget: HeadBudget | None
  form: Callable[[str, bool], Form]
  evaluation: Callable[[str, bool], Callable]
  args: Sequence[Any]
  flops: float
  moved: Callable[[bool], float]
  routed_baselines: bool = False
  expected: Callable[[Any], Any] = lambda first: first
  comparable: Callable[[Any], Any] = lambda found: found

  def entries(self, options: HeadOptions) -> list[tuple[str, bool, Form]]:
    """The forms to compile: name, whether every head is asked for, form.

    Of the baselines that the library computes in the same form, the first.
    """
    baselines: dict[Form, str] = {}
    if self.budget is None or self.routed_baselines:
      for name in options.baselines:
        baselines.setdefault(self.form(name, True), name)
    entries = [(name, True, form) for form, name in baselines.items()]
    for name in options.compared if self.budget is not None else ():
      form = self.form(name, False)
      if baselines.get(form) != name:
        entries.append((name, False, form))
    return entries


def compile_forms(
  options: HeadOptions, contests: Sequence[Contest]
) -> list[Variant]:
  """Compiles every form of head splits, and measures its errors.

  A form that fails has a fault in place of a program.

  Args:
    options: options of the command; they name the forms.
    contests: what the forms compute, with each head split.
  """
  entries = [
    (contest, *entry)
    for contest in contests
    for entry in contest.entries(options)
  ]
  lowered = [
    programs.try_lowering(
      contest.evaluation(name, every_head),
      *contest.args,
      loops=programs.default_loops(contest.flops),
    )
    for contest, name, every_head, _ in entries
  ]
  compiled = programs.finish_all(lowered)
  variants, current, expected = [], None, None
  for (contest, name, every_head, form), program in zip(entries, compiled):
    errors = (None, None)
    try:
      if isinstance(program, Exception):
        raise program
      if program.run is not None:
        found = program.run()
        if contest is not current:
          current, expected = contest, contest.expected(found)
        errors = exactness.compare(
          contest.comparable(found),
          contest.comparable(expected),
          options.dtype,
        )
    except Exception as error:  # compilers and drivers share no error class
      program, errors = None, (None, programs.failure(error))
    variants.append(
      Variant(
        name,
        1.0 if contest.budget is None else contest.budget.share,
        program,
        mha=contest.budget is None,
        baseline=every_head,
        packs=form.packs,
        flops=contest.flops,
        moved=contest.moved(form.packs),
        max_error=errors[0],
        fault=errors[1],
      )
    )
  return variants


def measure_heads(
  options: HeadOptions,
  op: str,
  variants: Callable[[str, int], list[Variant]],
  peak: float | None,
  memory: float | None = None,
) -> list[Row]:
  """Measures the variants of every length and mode.

  Args:
    options: options of the command.
    op: what is computed, see `Row`.
    variants: makes the variants of a mode and a length.
    peak: the device's matrix peak, FLOP/s; None where it is not measured.
    memory: the speed of its memory, bytes/s; None where it is not measured.
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
      memory=memory,
    )
  return rows


def measure_models(
  models: Mapping[str, Any],
  compiled: Mapping[str, Program],
  *others: Variant,
  **options: Any,
) -> list[Row]:
  """Measures programs of variants of a model.

  Args:
    models: model sections by name of the form; "mha" is the baseline.
    compiled: the program of each.
    *others: further programs to time with them.
    **options: of `measure`.
  """
  variants = [
    Variant(
      name,
      models[name].activated_share,
      program,
      mha=name == "mha",
      baseline=name == "dense",
    )
    for name, program in compiled.items()
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
  memory: float | None = None,
  min_seconds: float = 0.005,
) -> list[Row]:
  """Times programs in turns and reports each as a row.

  Programs for a device that is not here are reported without times.

  Args:
    variants: the programs.
    op: what they compute, see `Row`.
    mode: which passes they run, see `Row`.
    length: tokens of a sequence or slots of a cache; None for images.
    units: tokens or images of one evaluation.
    rounds: measured turns.
    peak: the device's matrix peak in FLOP/s; None where it is not measured.
    memory: the speed of its memory in bytes/s; None where it is not measured.
    min_seconds: seconds that a turn lasts at least; shorter programs are
      repeated in it.

  Returns:
    A row for each variant, in their order.
  """
  times = _times(variants, rounds, min_seconds)
  mha = {i: times[i].median for i in times if variants[i].mha}
  fastest = min(mha, key=mha.get, default=None)
  rows = []
  for index, variant in enumerate(variants):
    moved, moved_by = _moved(variant)
    timed = {}
    if index in times:
      seconds = times[index].median
      timed = {
        "ms": seconds * 1e3,
        "spread": times[index].spread,
        "ratio_to_dense": _ratio(
          seconds, _every_head(variants, times, variant)
        ),
        "ratio_to_mha": _ratio(seconds, list(mha.values())),
        "units_per_second": units / seconds,
        "peak_share": _share(variant.flops, seconds, peak),
        "memory_share": _share(moved, seconds, memory),
      }
    program = variant.program or Program(None)
    rows.append(
      Row(
        device=target().kind,
        op=op,
        mode=mode,
        length=length,
        share=variant.share,
        implementation="mha" if index == fastest else variant.implementation,
        every_head=None if variant.packs is None else not variant.packs,
        measured=not programs.is_absent(),
        flops=variant.flops,
        peak_bytes=program.bytes,
        temporary_bytes=program.temporary_bytes,
        moved_bytes=moved,
        moved_by=moved_by,
        kernels=dict(program.kernels),
        max_error=variant.max_error,
        fault=variant.fault,
        **timed,
      )
    )
  return rows


def _times(
  variants: Sequence[Variant], rounds: int, min_seconds: float
) -> dict[int, timing.Timing]:
  """Times of one evaluation of the programs that can run, by their index."""
  runs = {
    str(i): variant.program.run
    for i, variant in enumerate(variants)
    if variant.program is not None and variant.program.run is not None
  }
  times = {}
  for key, time in timing.interleaved(runs, rounds, min_seconds).items():
    loops = variants[int(key)].program.loops
    times[int(key)] = timing.Timing(time.median / loops, time.spread)
  return times


def _every_head(
  variants: Sequence[Variant], times: Mapping[int, timing.Timing], of: Variant
) -> list[float]:
  """Seconds of the forms that compute every head as a variant would.

  Those are with the same router, or without one where routing costs nothing.
  """
  baselines = [i for i in times if variants[i].baseline]
  same = [
    i
    for i in baselines
    if (variants[i].mha, variants[i].share) == (of.mha, of.share)
  ]
  chosen = same or [i for i in baselines if variants[i].mha]
  return [times[i].median for i in chosen]


def _moved(variant: Variant) -> tuple[int | None, str]:
  """Bytes read and written, and who says so."""
  program = variant.program
  if program is not None and program.moved_bytes is not None:
    return program.moved_bytes, "compiler"
  return (
    (None, "") if variant.moved is None else (round(variant.moved), "count")
  )


def _ratio(seconds: float, others: Sequence[float]) -> float | None:
  return seconds / min(others) if others else None


def _share(
  amount: float | None, seconds: float, peak: float | None
) -> float | None:
  """Share of a peak per second; None where a value is unknown."""
  return amount / seconds / peak if amount is not None and peak else None
