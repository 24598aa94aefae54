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
    form: name of the form of attention that runs.
    computed: heads that attention computes over all heads; None where it is
      unknown.
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
  form: str | None = None
  computed: float | None = None
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
    form: maps a name to the form that the library chooses.
    evaluation: maps it to a function of `args` that returns (outputs,
      gradients).
    args: arrays that every form evaluates.
    flops: FLOPs of one evaluation, of the active heads.
    moved: maps whether a form packs to the least bytes that it moves.
    expected: maps the (outputs, gradients) of the first form to those that all
      should return.
    comparable: selects what is compared from (outputs, gradients).
  """

  budget: HeadBudget | None
  form: Callable[[str], Form]
  evaluation: Callable[[str], Callable]
  args: Sequence[Any]
  flops: float
  moved: Callable[[bool], float]
  expected: Callable[[Any], Any] = lambda first: first
  comparable: Callable[[Any], Any] = lambda found: found

  @property
  def share(self) -> float:
    """Active heads over all heads."""
    return 1.0 if self.budget is None else self.budget.share

  def entries(self, options: HeadOptions) -> list[tuple[str, Form]]:
    """The forms to compile, with their names.

    Of the names for which the library computes every head in the same form, the
    first.
    """
    if self.budget is not None:
      return [(name, self.form(name)) for name in options.compared]
    baselines: dict[Form, str] = {}
    for name in options.baselines:
      baselines.setdefault(self.form(name), name)
    return [(name, form) for form, name in baselines.items()]


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
      contest.evaluation(name),
      *contest.args,
      loops=programs.default_loops(contest.flops),
    )
    for contest, name, _ in entries
  ]
  compiled = programs.finish_all(lowered)
  variants, current, expected = [], None, None
  for (contest, name, form), program in zip(entries, compiled):
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
        contest.share,
        program,
        mha=contest.budget is None,
        form=form.name,
        computed=contest.share if form.packs else 1.0,
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
) -> list[Row]:
  """Measures the variants of every length and mode.

  Args:
    options: options of the command.
    op: what is computed, see `Row`.
    variants: makes the variants of a mode and a length.
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
    )
  return rows


def measure_models(
  models: Mapping[str, Any],
  compiled: Mapping[str, Program],
  forms: Mapping[str, tuple[str, float]],
  *others: Variant,
  **options: Any,
) -> list[Row]:
  """Measures programs of variants of a model.

  Args:
    models: model sections by name of the form; "mha" is the baseline.
    compiled: the program of each.
    forms: the names of its forms of attention, and the share of all heads that
      they compute.
    *others: further programs to time with them.
    **options: of `measure`.
  """
  variants = [
    Variant(
      name,
      models[name].activated_share,
      program,
      name == "mha",
      *forms[name],
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
    min_seconds: seconds that a turn lasts at least; shorter programs are
      repeated in it.

  Returns:
    A row for each variant, in their order.
  """
  times = _times(variants, rounds, min_seconds)
  mha = [i for i in times if variants[i].mha]
  fastest = min(mha, key=lambda i: times[i].median, default=None)
  rows = []
  for index, variant in enumerate(variants):
    moved, moved_by = _moved(variant)
    timed = {}
    if index in times:
      time = times[index]
      timed = {
        "ms": time.median * 1e3,
        "spread": time.spread,
        "units_per_second": units / time.median,
      }
      if fastest is not None:
        ratio = time.over(times[fastest])
        timed |= {"ratio_to_mha": ratio.median, "ratio_spread": ratio.spread}
    program = variant.program or Program(None)
    rows.append(
      Row(
        device=target().kind,
        op=op,
        mode=mode,
        length=length,
        share=variant.share,
        implementation="mha" if index == fastest else variant.implementation,
        every_head=None if variant.computed is None else variant.computed == 1,
        form=variant.form,
        computed_share=variant.computed,
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
    times[int(key)] = timing.Timing(
      time.median / loops, time.spread, tuple(t / loops for t in time.turns)
    )
  return times


def _moved(variant: Variant) -> tuple[int | None, str]:
  """Bytes read and written, and who says so."""
  program = variant.program
  if program is not None and program.moved_bytes is not None:
    return program.moved_bytes, "compiler"
  return (
    (None, "") if variant.moved is None else (round(variant.moved), "count")
  )
