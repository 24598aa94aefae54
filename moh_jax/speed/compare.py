"""Turns programs that are compared with one another into rows."""

import dataclasses
from collections.abc import Sequence

import jax

from moh_jax.speed import timing
from moh_jax.speed.exactness import Errors
from moh_jax.speed.options import DENSE_FORMS, HeadOptions
from moh_jax.speed.programs import Program
from moh_jax.speed.report import Row


@dataclasses.dataclass(frozen=True)
class Variant:
  """One of the programs.

  Attributes:
    implementation: of the attention.
    share: of the heads that are at work, in (0, 1].
    program: what is timed.
    mha: whether it is multi-head attention, without a router.
    flops: of one evaluation; None where they are not counted.
    errors: against the dense form; None where they are not measured.
  """

  implementation: str
  share: float
  program: Program
  mha: bool = False
  flops: float | None = None
  errors: Errors | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
  """What the programs have in common.

  Attributes:
    op: see `Row`.
    mode: see `Row`.
    length: see `Row`.
    units: tokens or images of one evaluation.
    rounds: measured turns.
    dtype: whose limits the errors have.
    peak: the device's matrix peak, FLOP/s; None where it is not measured.
    least: seconds that a turn should take.
  """

  op: str
  mode: str
  length: int | None
  units: int
  rounds: int
  dtype: str = "float32"
  peak: float | None = None
  least: float = 0.005


def setting_of(
  options: HeadOptions, op: str, mode: str, length: int, peak: float, units: int
) -> Setting:
  """The setting of a comparison of heads.

  Args:
    options: of the command.
    op: see `Setting`, as mode, length, peak and units.
    mode: forward, both passes, causal or not.
    length: tokens, or slots of a cache.
    peak: the device's matrix peak, FLOP/s.
    units: what one call works on, for rates.
  """
  return Setting(
    op=op,
    mode=mode,
    length=length,
    units=units,
    rounds=options.rounds,
    dtype=options.dtype,
    peak=peak,
  )


def measure(setting: Setting, variants: Sequence[Variant]) -> list[Row]:
  """Times programs in turns.

  Args:
    setting: what they have in common.
    variants: the programs; at least one is multi-head attention.

  Returns:
    A row for each, but of multi-head attention the fastest form alone.
  """
  times = timing.interleaved(
    {str(i): variant.program.run for i, variant in enumerate(variants)},
    setting.rounds,
    setting.least,
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
    if setting.peak and variant.flops is not None:
      peak_share = variant.flops / seconds / setting.peak
    errors = variant.errors
    rows.append(
      Row(
        device=jax.devices()[0].device_kind,
        op=setting.op,
        mode=setting.mode,
        length=setting.length,
        share=variant.share,
        implementation="mha" if variant.mha else variant.implementation,
        ms=seconds * 1e3,
        spread=spread,
        ratio_to_dense=seconds / min(dense) if dense else None,
        ratio_to_mha=seconds / fastest[1],
        units_per_second=setting.units / seconds,
        flops=variant.flops,
        peak_share=peak_share,
        peak_bytes=variant.program.bytes,
        max_error=errors.largest if errors else None,
        fault=errors.fault(setting.dtype) if errors else None,
      )
    )
  return rows
