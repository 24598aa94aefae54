"""Runs the stages of `bench card`, within minutes and across kills."""

import dataclasses
import gc
import os
import textwrap
import time
from collections.abc import Callable
from typing import Any

import jax

from moh_jax._version import __version__
from moh_jax.ops.kernels import sizes
from moh_jax.speed import timing
from moh_jax.speed.card.scale import Scale
from moh_jax.speed.card.stages import TILES_FILE, Stage, stages
from moh_jax.speed.card.store import Store, rows_of


@dataclasses.dataclass
class Outcome:
  """What came of the stages.

  Attributes:
    results: of the stages that are done, by name.
    failed: why stages failed, by name.
    left: names of stages for which no time was left.
  """

  results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  failed: dict[str, str] = dataclasses.field(default_factory=dict)
  left: list[str] = dataclasses.field(default_factory=list)

  @property
  def faults(self) -> list[str]:
    """What is wrong, a line each: stages that failed, rows that are wrong."""
    lines = [f"{name}: {why}" for name, why in self.failed.items()]
    for stage, result in self.results.items():
      lines += [
        f"{stage}: {row.name}: {row.fault}"
        for row in rows_of(result)
        if row.fault
      ]
      lines += [
        f"{stage}: {check['form']}, {check['case']}: {check['fault']}"
        for check in result.get("checks", ())
        if check["fault"]
      ]
      if result.get("fault"):
        lines.append(f"{stage}: {result['fault']}")
    return lines


def open_store(folder: str | os.PathLike, scale: Scale) -> Store:
  """Opens the folder of the results of this device at this scale.

  Raises:
    ValueError: the folder holds results of another device.
    OSError: it is none, or cannot be made.
  """
  settings = {
    "machine": timing.machine(),
    "moh_jax": __version__,
    "scale": dataclasses.asdict(scale),
  }
  return Store(folder, settings)


def run(
  store: Store, scale: Scale, minutes: float, report: Callable[[str], None]
) -> Outcome:
  """Runs the stages that are not done yet, as long as there is time.

  A stage begins only before the minutes are over, so the last one ends later.

  Args:
    store: results of an earlier run are taken from it, new ones written to it.
    scale: the shapes.
    minutes: of this run.
    report: called with a line for each stage that ran or failed.
  """
  outcome, end = Outcome(), time.perf_counter() + 60 * minutes
  for stage in stages(scale, store):
    result = store.read(stage.name)
    if result is None and time.perf_counter() >= end:
      outcome.left.append(stage.name)
      continue
    _use_tiles(store)
    if result is None:
      try:
        result = _measure(stage, store, report)
      except Exception as error:  # compilers and drivers share no error class
        why = f"{type(error).__name__}: {error}"
        outcome.failed[stage.name] = textwrap.shorten(why, 300)
        report(f"{stage.name} failed: {outcome.failed[stage.name]}")
        continue
    outcome.results[stage.name] = result
  return outcome


def _measure(
  stage: Stage, store: Store, report: Callable[[str], None]
) -> dict[str, Any]:
  start = time.perf_counter()
  result = stage.measure()
  store.write(stage.name, result)
  report(f"{stage.name}: {time.perf_counter() - start:.1f} s")
  gc.collect()  # arrays that a traceback or a cycle still holds
  return result


def _use_tiles(store: Store) -> None:
  """Makes the kernels use the tiles that were tuned, if the user named none."""
  path = store.folder / TILES_FILE
  if path.exists() and sizes.FILE_VARIABLE not in os.environ:
    os.environ[sizes.FILE_VARIABLE] = str(path)
  sizes.measured.cache_clear()
  jax.clear_caches()  # compiled programs have the tiles of before
