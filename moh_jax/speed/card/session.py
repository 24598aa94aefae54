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
from moh_jax.ops.kernels import backends
from moh_jax.speed import timing
from moh_jax.speed.card.scale import Scale
from moh_jax.speed.card.stages import TILES_FILE, stages
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

  A stage begins only if the last one of its kind would have ended in time; the
  first of a kind begins before the minutes are over.

  Args:
    store: results of an earlier run are taken from it, new ones written to it.
    scale: the shapes.
    minutes: of this run.
    report: called with a line for each stage that ran or failed.
  """
  outcome, end = Outcome(), time.perf_counter() + 60 * minutes
  took: dict[str, float] = {}  # seconds of the last stage of each kind
  tiles = _use_tiles(store, "")
  for stage in stages(scale, store):
    kind = stage.name.partition("_")[0]
    result = store.read(stage.name)
    start = time.perf_counter()
    if result is None and start + took.get(kind, 0.0) >= end:
      outcome.left.append(stage.name)
      continue
    if result is None:
      try:
        result = stage.measure()
        store.write(stage.name, result)
      except Exception as error:  # compilers and drivers share no error class
        why = f"{type(error).__name__}: {error}"
        outcome.failed[stage.name] = textwrap.shorten(why, 300)
        report(f"{stage.name} failed: {outcome.failed[stage.name]}")
        continue
      finally:
        took[kind] = time.perf_counter() - start
        gc.collect()  # arrays that a traceback or a cycle still holds
      report(f"{stage.name}: {took[kind]:.1f} s")
      tiles = _use_tiles(store, tiles)
    outcome.results[stage.name] = result
  return outcome


def _use_tiles(store: Store, used: str) -> str:
  """Makes the kernels use the tiles that were tuned, if the user named none.

  Args:
    store: the folder where they are, if there are any.
    used: content of the file that is in use; "" for none.

  Returns:
    The content that is in use now.
  """
  path = store.folder / TILES_FILE
  named = os.environ.get(backends.FILE_VARIABLE, str(path))
  if named != str(path) or not path.exists() or path.read_text() == used:
    return used
  backends.read(path)  # a damaged file is an error here, not in every stage
  os.environ[backends.FILE_VARIABLE] = str(path)
  backends.measured.cache_clear()
  jax.clear_caches()  # compiled programs have the tiles of before
  return path.read_text()
